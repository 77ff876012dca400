/* Depthwise causal convolutions of a few taps, whose state is the last inputs.
 *
 * A sum goes from the bias over the oldest input to the newest, one fused multiply-add after the
 * other. Of the inputs a task keeps as many rows as there are taps, in turns.
 */
#include "recurrent/states.h"
#include "simd/sigmoid.h"

enum {
    TASK_CHANNELS = 256, /* decides speed only */
};

struct causal_conv {
    const float *x;    /* [T, C]; with gates [T, 3 C]: b, c and x */
    const float *taps; /* [K, C], the newest input's last */
    const float *bias; /* [C]; or null */
    float *states;     /* [P, K - 1, C], the newest input last */
    void *out;         /* [T, C] */
    int64_t x_stride, page_stride, num_channels, num_taps;
    int64_t has_gates, has_silu, is_bf16;
};

int64_t topwork_causal_conv_scratch(const void *op)
{
    const struct causal_conv *p = op;
    return p->num_taps * TASK_CHANNELS * (int64_t)sizeof(float);
}

/* One row of the channels from `first` on: its inputs to their place, its sums to out. */
INLINE void convolve_row(const struct causal_conv *p, int64_t row, int64_t place, int64_t first,
                         int64_t count, float *inputs)
{
    const float *x = p->x + row * p->x_stride + first;
    char *out = (char *)p->out + (row * p->num_channels + first) * (p->is_bf16 ? 2 : 4);
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t rest = count - i;
        f32v newest = load_some(x, i, rest, false);
        if (p->has_gates)
            newest *= load_some(x + 2 * p->num_channels, i, rest, false);
        store_some(inputs + place * TASK_CHANNELS, i, rest, false, newest);
        f32v sum = {0};
        if (p->bias != NULL)
            sum = load_some(p->bias + first, i, rest, false);
        for (int64_t tap = 0; tap < p->num_taps; tap++) {
            int64_t age = p->num_taps - 1 - tap; /* rows before this one */
            int64_t at = place >= age ? place - age : place - age + p->num_taps;
            f32v weight = load_some(p->taps + tap * p->num_channels + first, i, rest, false);
            f32v input = load_some(inputs + at * TASK_CHANNELS, i, rest, false);
            sum = multiply_add(input, weight, sum);
        }
        if (p->has_silu)
            sum = silu(sum);
        if (p->has_gates)
            sum *= load_some(x + p->num_channels, i, rest, false);
        store_some(out, i, rest, p->is_bf16, sum);
    }
}

/* Copy the inputs before a run from its state, or those behind it to there. */
static void move_state(const struct causal_conv *p, const struct state_run *run, int64_t first,
                       int64_t count, float *inputs, int64_t place, bool is_end)
{
    float *state = p->states + run->page * p->page_stride + first;
    size_t size = (size_t)count * sizeof *state;
    for (int64_t i = 0; i < p->num_taps - 1; i++) {
        float *input = inputs + (place + i) % p->num_taps * TASK_CHANNELS;
        float *kept = state + i * p->num_channels;
        if (is_end)
            memcpy(kept, input, size);
        else if (run->is_new)
            memset(input, 0, size);
        else
            memcpy(input, kept, size);
    }
}

void topwork_causal_conv(const void *op, struct worker *worker)
{
    const struct causal_conv *p = op;
    int64_t num_parts = round_up(p->num_channels, TASK_CHANNELS) / TASK_CHANNELS, part;
    float *inputs = worker->scratch; /* [K, TASK_CHANNELS] */
    for (const struct state_run *run; (run = take_run(worker, num_parts, &part)) != NULL;) {
        int64_t first = part * TASK_CHANNELS;
        int64_t count = smaller(p->num_channels - first, TASK_CHANNELS);
        move_state(p, run, first, count, inputs, 0, false);
        int64_t place = p->num_taps - 1;
        for (int64_t row = run->start; row < run->stop; row++) {
            convolve_row(p, row, place, first, count, inputs);
            place = (place + 1) % p->num_taps;
        }
        /* What stands at `place` is the oldest input, which no later row needs. */
        move_state(p, run, first, count, inputs, place + 1, true);
    }
}
