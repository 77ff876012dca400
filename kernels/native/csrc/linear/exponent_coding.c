/* Panels of bfloat16 are brought into the form of exponent_coding.h, a panel a task. */
#include "linear/exponent_coding.h"
#include "runtime/thread_pool.h"

enum {
    STEP_WORDS = GROUP_WORDS / GROUP_STEPS,
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

/* Tell whether products are computed from coded panels here. */
int topwork_can_code(void) { return CAN_CODE; }

int64_t topwork_encode_panels_scratch(const void *op)
{
    (void)op;
    return 0;
}

#if CAN_CODE

/* The bytes of a step, as a group has them. */
INLINE __m512i lower_bytes(const uint32_t *words)
{
    __m512i mask = _mm512_set1_epi16(0xff);
    return _mm512_packus_epi16(_mm512_and_si512(_mm512_loadu_si512(words), mask),
                               _mm512_and_si512(_mm512_loadu_si512(words + LANES), mask));
}

INLINE __m512i upper_bytes(const uint32_t *words)
{
    return _mm512_packus_epi16(_mm512_srli_epi16(_mm512_loadu_si512(words), 8),
                               _mm512_srli_epi16(_mm512_loadu_si512(words + LANES), 8));
}

/* Fill the table with the bytes that there are most of, of two as many the smaller first. */
static void choose_codes(const uint32_t *panel, int64_t num_steps, uint8_t table[NUM_CODES])
{
    uint32_t counts[NUM_COUNTS][256] = {0};
    uint8_t bytes[64];
    for (int64_t step = 0; step < num_steps; step++) {
        _mm512_storeu_si512(bytes, upper_bytes(panel + step * STEP_WORDS));
        for (int i = 0; i < 64; i++)
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

/* Return the codes of upper bytes, and which bytes the table does not have. */
INLINE __m512i find_codes(__m512i upper, const uint8_t *table, uint64_t *is_outlier)
{
    __m512i codes = _mm512_setzero_si512();
    __mmask64 is_found = 0;
    for (int code = 0; code < NUM_CODES; code++) {
        __mmask64 is_this = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8((char)table[code]));
        codes = _mm512_mask_mov_epi8(codes, is_this, _mm512_set1_epi8((char)code));
        is_found |= is_this;
    }
    *is_outlier = ~is_found;
    return codes;
}

/* Write a step's share of its group; return which of its words have to be in the list. */
static uint32_t code_step(const uint32_t *words, const uint8_t *table, int half, uint8_t *group)
{
    uint64_t is_outlier;
    __m512i codes = find_codes(upper_bytes(words), table, &is_outlier);
    if (half == 1)
        codes = _mm512_or_si512(_mm512_slli_epi16(codes, 4), _mm512_loadu_si512(group + 128));
    _mm512_storeu_si512(group + 64 * half, lower_bytes(words));
    _mm512_storeu_si512(group + 128, codes);
    uint32_t outlier_words = 0;
    for (int word = 0; is_outlier != 0 && word < STEP_WORDS; word++)
        outlier_words |= (uint32_t)(is_outlier >> byte_of_word(word) & 3 ? 1 : 0) << word;
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

#else

static void code_panel(const struct coding *p, int64_t panel)
{
    (void)p, (void)panel;
    __builtin_unreachable(); /* nothing is coded here */
}

#endif

/* The step's rows are the panels. */
void topwork_encode_panels(const void *op, struct worker *worker)
{
    int64_t num_panels = worker->step->num_rows;
    for (int64_t panel; (panel = take_task(worker, num_panels)) >= 0;)
        code_panel(op, panel);
}
