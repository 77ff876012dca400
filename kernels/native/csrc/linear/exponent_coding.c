/* Panels of bfloat16 are brought into the form of exponent_coding.h, a panel a task. */
#include "linear/exponent_coding.h"
#include "runtime/thread_pool.h"

enum {
    STEP_WORDS = GROUP_WORDS / GROUP_STEPS,
    STEP_BYTES = STEP_WORDS * 2, /* upper or lower ones */
    NUM_COUNTS = 4, /* of each byte: the same one again and again would wait for its own sum */
};

struct coding {
    const uint32_t *panels;   /* [panels, steps, STEP_WORDS] */
    uint8_t *coded;           /* [panels, groups, GROUP_BYTES] */
    uint8_t *tables;          /* [panels, NUM_CODES] */
    struct outlier *outliers; /* [panels, max_outliers] */
    int32_t *num_outliers;    /* [panels]; max_outliers + 1 in one that has more */
    int64_t num_steps, max_outliers;
};

int64_t topwork_encode_panels_scratch(const void *op)
{
    (void)op;
    return 0;
}

/* Give a byte of each bfloat16 of a step, the lower or the upper one, as a group has them. */
INLINE void bytes_of_step(const uint32_t *words, int shift, uint8_t to[STEP_BYTES])
{
    uint16_t halves[STEP_BYTES];
    memcpy(halves, words, sizeof halves);
    for (int quarter = 0; quarter < 4; quarter++)
        for (int i = 0; i < 8; i++) {
            to[quarter * 16 + i] = (uint8_t)(halves[quarter * 8 + i] >> shift);
            to[quarter * 16 + 8 + i] = (uint8_t)(halves[STEP_WORDS + quarter * 8 + i] >> shift);
        }
}

/* Fill the table with the bytes that there are most of, of two as many the smaller first. */
static void choose_codes(const uint32_t *panel, int64_t num_steps, uint8_t table[NUM_CODES])
{
    uint32_t counts[NUM_COUNTS][256] = {0};
    uint8_t bytes[STEP_BYTES];
    for (int64_t step = 0; step < num_steps; step++) {
        bytes_of_step(panel + step * STEP_WORDS, 8, bytes);
        for (int i = 0; i < STEP_BYTES; i++)
            counts[i % NUM_COUNTS][bytes[i]]++;
    }
    for (int byte = 0; byte < 256; byte++)
        for (int i = 1; i < NUM_COUNTS; i++)
            counts[0][byte] += counts[i][byte];
    bool is_taken[256] = {false};
    for (int code = 0; code < NUM_CODES; code++) {
        int best = -1;
        for (int byte = 0; byte < 256; byte++)
            if (!is_taken[byte] && (best < 0 || counts[0][byte] > counts[0][best]))
                best = byte;
        table[code] = (uint8_t)best;
        is_taken[best] = true;
    }
}

/* Write a step's share of its group; return which of its words have to be in the list. */
static uint32_t code_step(const uint32_t *words, const uint8_t *table, int half, uint8_t *group)
{
    uint8_t upper[STEP_BYTES], codes[STEP_BYTES] = {0}, is_known[STEP_BYTES] = {0};
    bytes_of_step(words, 0, group + STEP_BYTES * half);
    bytes_of_step(words, 8, upper);
    for (int code = 0; code < NUM_CODES; code++)
        for (int i = 0; i < STEP_BYTES; i++) {
            uint8_t is_this = upper[i] == table[code] ? 0xff : 0;
            codes[i] = (uint8_t)(codes[i] | (is_this & code));
            is_known[i] |= is_this;
        }
    uint8_t *to = group + GROUP_STEPS * STEP_BYTES, all_known = 0xff;
    for (int i = 0; i < STEP_BYTES; i++) {
        to[i] = half == 0 ? codes[i] : (uint8_t)(to[i] | codes[i] << 4);
        all_known &= is_known[i];
    }
    uint32_t outlier_words = 0;
    for (int word = 0; !all_known && word < STEP_WORDS; word++) {
        const uint8_t *of_word = is_known + byte_of_word(word);
        outlier_words |= (uint32_t)(of_word[0] && of_word[1] ? 0 : 1) << word;
    }
    return outlier_words;
}

static void code_panel(const struct coding *p, int64_t panel)
{
    const uint32_t *words = p->panels + panel * p->num_steps * STEP_WORDS;
    int64_t num_groups = (p->num_steps + GROUP_STEPS - 1) / GROUP_STEPS;
    uint8_t *groups = p->coded + panel * num_groups * GROUP_BYTES;
    uint8_t *table = p->tables + panel * NUM_CODES;
    struct outlier *outliers = p->outliers + panel * p->max_outliers;
    int32_t num_outliers = 0;
    choose_codes(words, p->num_steps, table);
    if (p->num_steps % GROUP_STEPS)
        memset(groups + (num_groups - 1) * GROUP_BYTES, 0, GROUP_BYTES);
    for (int64_t step = 0; step < p->num_steps; step++, words += STEP_WORDS) {
        uint32_t outlier_words = code_step(words, table, (int)(step % GROUP_STEPS),
                                           groups + step / GROUP_STEPS * GROUP_BYTES);
        for (; outlier_words != 0 && num_outliers <= p->max_outliers;
             outlier_words &= outlier_words - 1) {
            int word = __builtin_ctz(outlier_words);
            if (num_outliers < p->max_outliers)
                outliers[num_outliers] =
                    (struct outlier){(int32_t)(step * STEP_WORDS + word), words[word]};
            num_outliers++;
        }
    }
    p->num_outliers[panel] = num_outliers;
}

/* The step's rows are the panels. */
void topwork_encode_panels(const void *op, struct worker *worker)
{
    int64_t num_panels = worker->step->num_rows;
    for (int64_t panel; (panel = take_task(worker, num_panels)) >= 0;)
        code_panel(op, panel);
}
