/* Weights in 4 bits: the codes, scales and offsets of groups, as `quantize` in kernels/quantized.py
 * finds them, bit for bit. Sums go over lanes in its order, and no product is fused with a sum.
 */
#include "linear/quantized_rows.h"
#include "runtime/thread_pool.h"

struct quantize_groups {
    const void *weight; /* [N, K] float32 or bfloat16 */
    int8_t *codes;      /* [N, groups, GROUP] */
    uint16_t *scales;   /* [N, groups] bfloat16 */
    uint16_t *offsets;  /* likewise */
    int64_t stride, num_inputs, is_bf16;
    int64_t is_coded; /* the numbers are what codes mean, which may be found again */
};

enum { LARGEST_INT4 = 15, NUM_CUTS = 2 };

/* What stands for the numbers of a group. */
struct int4_group {
    f32v codes[GROUP_VECTORS];
    float scale, offset, error;
};

INLINE float group_sum(const f32v x[GROUP_VECTORS])
{
    f32v halves[GROUP_VECTORS];
    memcpy(halves, x, sizeof halves);
    for (int left = GROUP_VECTORS / 2; left > 0; left /= 2)
        for (int i = 0; i < left; i++)
            halves[i] += halves[i + left];
    return sum_lanes(halves[0]);
}

INLINE float round_float(float x) { return round_floats(splat(x))[0]; }

INLINE uint16_t upper_half(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Return the codes whose numbers are nearest; the scale is positive. */
INLINE void nearest_codes(const f32v x[GROUP_VECTORS], float scale, float offset,
                          f32v codes[GROUP_VECTORS])
{
    for (int i = 0; i < GROUP_VECTORS; i++) {
        f32v place = (x[i] - splat(offset)) / splat(scale);
        place = select_lanes(place > 0.0f, place, splat(0.0f));
        place = select_lanes(place < (float)LARGEST_INT4, place, splat((float)LARGEST_INT4));
        codes[i] = words_to_floats(nearest_words(place));
    }
}

/* Return the squared error of what stands for a group's numbers. */
INLINE float group_error(const f32v x[GROUP_VECTORS], const struct int4_group *group)
{
    f32v squares[GROUP_VECTORS];
    for (int i = 0; i < GROUP_VECTORS; i++) {
        f32v off = as_rounded(group->codes[i] * splat(group->scale)) + splat(group->offset);
        off -= x[i];
        squares[i] = as_rounded(off * off);
    }
    return group_sum(squares);
}

INLINE bool is_scale(float x) { return x > 0 && x < float_of(0x7f800000); }

/* Find the scale and the offset with the least squared error for codes that are made with a range
 * of 15 + `cut` steps, of which the codes leave out as many at both ends; then the nearest codes.
 * Return false if there are none. */
INLINE bool fit_group(const f32v x[GROUP_VECTORS], float least, float most, float cut,
                      struct int4_group *group)
{
    float scale = (most - least) / ((float)LARGEST_INT4 + cut);
    if (!is_scale(scale))
        return false;
    float margin = as_rounded(splat(scale * ((cut > 0 ? cut : 0) / 2)))[0];
    nearest_codes(x, scale, least + margin, group->codes);
    float mean = group_sum(x) / GROUP, mean_code = group_sum(group->codes) / GROUP;
    f32v products[GROUP_VECTORS], squares[GROUP_VECTORS];
    for (int i = 0; i < GROUP_VECTORS; i++) {
        f32v about = group->codes[i] - splat(mean_code);
        products[i] = as_rounded(about * x[i]);
        squares[i] = as_rounded(about * about);
    }
    group->scale = round_float(group_sum(products) / group_sum(squares));
    if (!is_scale(group->scale))
        return false;
    float of_codes = as_rounded(splat(group->scale * mean_code))[0];
    group->offset = round_float(mean - of_codes);
    nearest_codes(x, group->scale, group->offset, group->codes);
    group->error = group_error(x, group);
    return true;
}

/* Load a group, behind the row's end its last number once more; tell whether all are finite. */
INLINE bool load_weights(const struct plain_row *row, int64_t first, f32v x[GROUP_VECTORS])
{
    load_group(row, first, x);
    if (largest_word(larger_sizes((i32v){0}, x)) >= 0x7f800000)
        return false;
    if (first + GROUP > row->num_inputs) {
        float last = load_some(row->from, row->num_inputs - 1, 1, row->is_bf16)[0];
        for (int i = 0; i < GROUP_VECTORS; i++) {
            i32v place = lane_numbers() + (int32_t)(first + i * LANES);
            x[i] = select_lanes(place < (int32_t)row->num_inputs, x[i], splat(last));
        }
    }
    return true;
}

static void quantize_group(const f32v x[GROUP_VECTORS], bool is_coded, struct int4_group *best)
{
    float least = -largest_lane(-x[0]), most = largest_lane(x[0]);
    for (int i = 1; i < GROUP_VECTORS; i++) {
        float low = -largest_lane(-x[i]), high = largest_lane(x[i]);
        least = low < least ? low : least;
        most = high > most ? high : most;
    }
    *best = (struct int4_group){.offset = round_float(least)};
    best->error = group_error(x, best);
    int num_cuts = NUM_CUTS + (is_coded ? LARGEST_INT4 - 1 : 0);
    for (int i = 0; i < num_cuts; i++) {
        int cut = i < NUM_CUTS ? i : NUM_CUTS - 1 - i;
        struct int4_group found;
        if (fit_group(x, least, most, (float)cut, &found) && found.error < best->error)
            *best = found;
    }
}

static void quantize_row(const struct quantize_groups *p, int64_t row)
{
    int64_t row_size = p->stride * (p->is_bf16 ? 2 : 4);
    struct plain_row plain = {.from = (const char *)p->weight + row * row_size,
                              .num_inputs = p->num_inputs,
                              .is_bf16 = p->is_bf16};
    int64_t groups = num_groups(p->num_inputs);
    for (int64_t group = 0; group < groups; group++) {
        int64_t place = row * groups + group;
        f32v x[GROUP_VECTORS];
        struct int4_group best = {.scale = float_of(0x7fc00000)};
        if (load_weights(&plain, group * GROUP, x))
            quantize_group(x, p->is_coded, &best);
        for (int i = 0; i < GROUP_VECTORS; i++) {
            i8v codes = narrow_to_bytes(nearest_words(best.codes[i]));
            memcpy(p->codes + place * GROUP + i * LANES, &codes, sizeof codes);
        }
        p->scales[place] = upper_half(best.scale);
        p->offsets[place] = upper_half(best.offset);
    }
}

int64_t topwork_quantize_groups_scratch(const void *op)
{
    (void)op;
    return 0;
}

/* The step's rows are the outputs. */
void topwork_quantize_groups(const void *op, struct worker *worker)
{
    const struct quantize_groups *p = op;
    for (int64_t row; (row = take_task(worker, worker->step->num_rows)) >= 0;)
        quantize_row(p, row);
}
