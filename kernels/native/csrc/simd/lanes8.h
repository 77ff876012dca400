/* Vectors of 8 floats, one register of AVX2, and what depends on there being 8.
 *
 * For vector.h alone, which has the macros that are used here; lanes16.h is the same for AVX-512.
 */
#define LANES 8

typedef float f32v __attribute__((vector_size(32)));
typedef int32_t i32v __attribute__((vector_size(32)));
typedef uint32_t u32v __attribute__((vector_size(32)));
typedef uint16_t u16v __attribute__((vector_size(16)));
typedef uint64_t u64v __attribute__((vector_size(32)));
typedef double f64v __attribute__((vector_size(32)));

INLINE i32v lane_numbers(void) { return (i32v){0, 1, 2, 3, 4, 5, 6, 7}; }

INLINE f32v multiply_add(f32v a, f32v b, f32v c)
{
    return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

INLINE f32v to_floats(f64v first, f64v last)
{
    return (f32v)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)last), _mm256_cvtpd_ps((__m256d)first));
}

/* Fold a vector onto itself: lane i with lane i ^ 4, then ^ 2, ^ 1. */
#define FOLD_LANES(x, other, combine)                  \
    do {                                               \
        other = SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3); \
        x = combine;                                   \
        other = SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5); \
        x = combine;                                   \
        other = SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6); \
        x = combine;                                   \
    } while (0)

INLINE void sum_lanes_of_four(const f32v x[4], float *to)
{
    f32v pairs[2];
    for (int i = 0; i < 2; i++) {
        f32v a = x[2 * i], b = x[2 * i + 1];
        pairs[i] =
            SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    f32v a = pairs[0], b = pairs[1]; /* of vectors 0 and 1, 2 and 3 */
    f32v sums = SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    sums += SHUFFLE(sums, sums, 1, 0, 3, 2, 5, 4, 7, 6);
    sums = SHUFFLE(sums, sums, 0, 4, 2, 6, 0, 4, 2, 6);
    memcpy(to, &sums, 4 * sizeof(float));
}

INLINE void transpose(f32v x[LANES])
{
    for (int i = 0; i < 4; i++) {
        f32v a = x[i], b = x[i + 4];
        x[i] = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
        x[i + 4] = SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int j = 0; j < 4; j++) {
        int i = j / 2 * 4 + j % 2;
        f32v a = x[i], b = x[i + 2];
        x[i] = SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
        x[i + 2] = SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < LANES; i += 2) {
        f32v a = x[i], b = x[i + 1];
        x[i] = SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
        x[i + 1] = SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
}
