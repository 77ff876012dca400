/* A LoRA in int8: rows of A, and of B transposed, as codes from -127 to 127.
 *
 * Both have a scale for each lora_rank, as rows of linears have (linear/quantized_rows.h), and
 * those of A are rotated as these are. Not ops: the thread that loads an adapter calls them beside
 * steps.
 */
#include "linear/quantized_rows.h"
#include "lora/lora.h"

static void load_rotated(const struct plain_row *row, int64_t first, f32v x[GROUP_VECTORS])
{
    load_group(row, first, x);
    if (first + GROUP <= row->num_inputs)
        rotate_group(x);
}

/* Write the panels of A [R, K]: of 16 lora_ranks each, [ceil(K / 4), lora_ranks, 4]. */
void topwork_lora_codes_of_a(const void *rows, int64_t num_ranks, int64_t width, int64_t is_bf16,
                             int8_t *codes, float *scales)
{
    int64_t row_bytes = width * (is_bf16 ? 2 : 4);
    for (int64_t rank = 0; rank < num_ranks; rank++) {
        struct plain_row row = {(const char *)rows + rank * row_bytes, width, is_bf16, true};
        int64_t first_rank = rank / RANK_PANEL * RANK_PANEL;
        int64_t line = smaller(num_ranks - first_rank, RANK_PANEL) * QUAD;
        int8_t *to = codes + int8_bytes_of_a(first_rank, width) + (rank - first_rank) * QUAD;
        f32v x[GROUP_VECTORS];
        i32v sizes = {0};
        for (int64_t first = 0; first < width; first += GROUP) {
            load_rotated(&row, first, x);
            sizes = larger_sizes(sizes, x);
        }
        int32_t largest = largest_word(sizes);
        scales[rank] = scale_of(largest);
        for (int64_t first = 0; first < width; first += GROUP) {
            int8_t group[GROUP];
            load_rotated(&row, first, x);
            code_group(x, inverse_of(scales[rank], largest), group);
            for (int64_t i = 0; i < smaller(GROUP, width - first); i += QUAD, to += line)
                memcpy(to, group + i, QUAD);
        }
    }
}

/* Write the panels of B transposed [R, N]: of 32 outputs each, [ceil(R / 4), outputs, 4]. */
void topwork_lora_codes_of_b(const void *rows, int64_t num_ranks, int64_t width, int64_t is_bf16,
                             int8_t *codes, float *scales)
{
    int64_t row_bytes = width * (is_bf16 ? 2 : 4);
    for (int64_t rank = 0; rank < num_ranks; rank += QUAD) {
        int64_t count = smaller(QUAD, num_ranks - rank);
        const char *from = (const char *)rows + rank * row_bytes;
        float inverses[QUAD];
        for (int64_t i = 0; i < count; i++) {
            int32_t largest = largest_bits(from + i * row_bytes, width, is_bf16);
            scales[rank + i] = scale_of(largest);
            inverses[i] = inverse_of(scales[rank + i], largest);
        }
        for (int64_t output = 0; output < width; output += LANES) {
            int64_t panel = output / PANEL_OUTPUTS * PANEL_OUTPUTS;
            int64_t size = smaller(PANEL_OUTPUTS, width - panel);
            u32v quads = {0};
            for (int64_t i = 0; i < count; i++) {
                f32v x = load_some(from + i * row_bytes, output, width - output, is_bf16);
                quads |= ((u32v)nearest_words(x * inverses[i]) & 255) << (uint32_t)(8 * i);
            }
            int8_t *to = codes + int8_bytes_of_b(num_ranks, panel);
            to += rank * size + (output - panel) * QUAD;
            memcpy(to, &quads, (size_t)smaller(LANES, width - output) * QUAD);
        }
    }
}
