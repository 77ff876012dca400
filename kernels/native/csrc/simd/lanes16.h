/* Vectors of 16 floats, one register of AVX-512, and what depends on there being 16.
 *
 * For vector.h alone, which has the macros that are used here; lanes8.h is the same for AVX2.
 */
#define LANES 16

typedef float f32v __attribute__((vector_size(64)));
typedef int32_t i32v __attribute__((vector_size(64)));
typedef uint32_t u32v __attribute__((vector_size(64)));
typedef uint16_t u16v __attribute__((vector_size(32)));
typedef uint64_t u64v __attribute__((vector_size(64)));
typedef double f64v __attribute__((vector_size(64)));

INLINE i32v lane_numbers(void)
{
    return (i32v){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

INLINE f32v multiply_add(f32v a, f32v b, f32v c)
{
    return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

INLINE f32v to_floats(f64v first, f64v last)
{
    __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)first));
    return (f32v)_mm512_insertf32x8(low, _mm512_cvtpd_ps((__m512d)last), 1);
}

/* Fold a vector onto itself: lane i with lane i ^ 8, then ^ 4, ^ 2, ^ 1. */
#define FOLD_LANES(x, other, combine)                                                \
    do {                                                                             \
        other = SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); \
        x = combine;                                                                 \
        other = SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11); \
        x = combine;                                                                 \
        other = SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13); \
        x = combine;                                                                 \
        other = SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14); \
        x = combine;                                                                 \
    } while (0)

INLINE void sum_lanes_of_four(const f32v x[4], float *to)
{
    f32v pairs[2];
    for (int i = 0; i < 2; i++) {
        f32v a = x[2 * i], b = x[2 * i + 1];
        pairs[i] = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
                   + SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    f32v a = pairs[0], b = pairs[1];
    f32v sums = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
                + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    sums += SHUFFLE(sums, sums, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    sums += SHUFFLE(sums, sums, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    sums = SHUFFLE(sums, sums, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    memcpy(to, &sums, 4 * sizeof(float));
}

INLINE void transpose(f32v x[LANES])
{
    for (int i = 0; i < 8; i++) {
        f32v a = x[i], b = x[i + 8];
        x[i] = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        x[i + 8] = SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int j = 0; j < 8; j++) {
        int i = j / 4 * 8 + j % 4;
        f32v a = x[i], b = x[i + 4];
        x[i] = SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        x[i + 4] = SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int j = 0; j < 8; j++) {
        int i = j / 2 * 4 + j % 2;
        f32v a = x[i], b = x[i + 2];
        x[i] = SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        x[i + 2] = SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int i = 0; i < LANES; i += 2) {
        f32v a = x[i], b = x[i + 1];
        x[i] = SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        x[i + 1] = SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
}
