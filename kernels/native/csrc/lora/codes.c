/* Lora_ranks in int8: rows of A, or of B transposed, as codes from -127 to 127.
 *
 * 1 stands for the row's largest size / 127; a code is the float32 product x * (127 / largest),
 * rounded to the nearest, ties to even. Where the largest is below 2^-100 all is zero. Not an op:
 * the thread that loads an adapter calls it beside steps.
 */
#include "simd/scales.h"

void topwork_lora_codes(const void *rows, int64_t num_rows, int64_t width, int64_t is_bf16,
                        int8_t *codes, float *scales)
{
    int64_t row_bytes = width * (is_bf16 ? 2 : 4);
    for (int64_t row = 0; row < num_rows; row++, codes += width) {
        const char *from = (const char *)rows + row * row_bytes;
        int32_t largest = largest_bits(from, width, is_bf16);
        scales[row] = scale_of(largest);
        float inverse = scales[row] > 0 ? (float)LARGEST_BYTE / float_of(largest) : 0;
        for (int64_t i = 0; i < width; i += LANES) {
            f32v x = load_some(from, i, width - i, is_bf16);
            i8v bytes = narrow_to_bytes(nearest_words(x * inverse));
            memcpy(codes + i, &bytes, (size_t)smaller(LANES, width - i));
        }
    }
}
