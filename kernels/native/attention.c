/* Causal attention over KV pages, one call for all rows of a layer.
 *
 * Owns the order in which a row is summed: blocks of 64 positions from position 0 on, a score over
 * head_dim from the first element to the last, an online softmax whose denominator is 16 sums (one
 * for each position modulo 16), values from the first position to the last. Nothing of it depends
 * on other rows, so a row has the same bits in any chunk, batch and thread. What lies past a row's
 * own position is never a number to it.
 *
 * Rows of a task: its tokens' heads that share one KV head, token by token.
 */
#include <math.h>
#include <stdlib.h>

#include "vector.h"

enum {
    BLOCK = 64,      /* positions whose softmax is taken at once; part of the result's definition */
    TASK_ROWS = 256, /* rows that share one packing of K and V; decides speed only */
};

struct problem {
    const void *q, *k_pages, *v_pages;
    void *out;
    const int64_t *sequences;  /* [S, 3]: first row, rows, positions */
    const int64_t *page_table; /* [S, max_pages] */
    int64_t q_token_stride, q_head_stride;
    int64_t num_sequences, max_pages, num_heads, num_kv_heads, head_dim, page_size;
    double scale;
    int64_t is_bf16, num_threads;
};

struct task {
    const int64_t *pages; /* of the sequence */
    int64_t first_token, num_tokens, first_position, kv_head;
};

struct workspace {
    float *queries;     /* [TASK_ROWS, width], scaled */
    float *sums;        /* [TASK_ROWS, width]: unnormalised output */
    float *maxima;      /* [TASK_ROWS] */
    float *denominator; /* [TASK_ROWS, LANES] */
    float *keys;        /* [D, BLOCK] */
    float *values;      /* [BLOCK, width] */
    float *weights;     /* [TILE_ROWS, BLOCK]: scores, then their exp */
};

INLINE int64_t group_size(const struct problem *p) { return p->num_heads / p->num_kv_heads; }

/* Return the tokens of a task: as many as a tile of rows likes, but none that no sequence has. */
INLINE int64_t task_tokens(const struct problem *p)
{
    int64_t longest = 1, tokens = TASK_ROWS / group_size(p);
    for (int64_t i = 0; i < p->num_sequences; i++)
        longest = p->sequences[i * 3 + 1] > longest ? p->sequences[i * 3 + 1] : longest;
    return tokens > 0 ? smaller(tokens, longest) : 1;
}

INLINE int64_t row_width(const struct problem *p) { return round_up(p->head_dim, TILE_COLUMNS); }

INLINE void transpose(f32x16 x[LANES])
{
    for (int i = 0; i < 8; i++) {
        f32x16 a = x[i], b = x[i + 8];
        x[i] = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        x[i + 8] = SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    for (int j = 0; j < 8; j++) {
        int i = j / 4 * 8 + j % 4;
        f32x16 a = x[i], b = x[i + 4];
        x[i] = SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        x[i + 4] = SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    for (int j = 0; j < 8; j++) {
        int i = j / 2 * 4 + j % 2;
        f32x16 a = x[i], b = x[i + 2];
        x[i] = SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        x[i + 2] = SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int i = 0; i < LANES; i += 2) {
        f32x16 a = x[i], b = x[i + 1];
        x[i] = SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        x[i + 1] = SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
}

/* Fill [d, position] for 16 positions of K from their rows; bfloat16 is turned two by two. */
INLINE void pack_keys(const char *const rows[LANES], int64_t dim, float *keys, bool is_bf16)
{
    int64_t row_size = dim * (is_bf16 ? 2 : 4);
    for (int64_t at = 0; at < row_size; at += (int64_t)sizeof(f32x16)) {
        f32x16 square[LANES];
        int64_t size = smaller(row_size - at, (int64_t)sizeof(f32x16));
        for (int j = 0; j < LANES; j++)
            square[j] = load_some(rows[j] + at, 0, size / 4, false);
        transpose(square);
        float *to = keys + at / (is_bf16 ? 2 : 4) * BLOCK;
        for (int64_t i = 0; i < size / 4; i++)
            if (is_bf16) {
                store_f32(to + 2 * i * BLOCK, (f32x16)((u32x16)square[i] << 16));
                store_f32(to + (2 * i + 1) * BLOCK, (f32x16)((u32x16)square[i] & 0xffff0000));
            } else {
                store_f32(to + i * BLOCK, square[i]);
            }
    }
}

/* Widen `count` positions from `first` on: K transposed, V as it lies. */
INLINE void pack(const struct problem *p, const struct task *task, const struct workspace *w,
                 int64_t first, int64_t count, bool is_bf16)
{
    const char *k_rows[BLOCK];
    int64_t width = row_width(p), dim = p->head_dim, row_size = dim * (is_bf16 ? 2 : 4);
    int64_t page = first / p->page_size, offset = first % p->page_size;
    for (int64_t j = 0; j < count; j++) {
        int64_t head = task->pages[page] * p->num_kv_heads + task->kv_head;
        int64_t start = (head * p->page_size + offset) * row_size;
        k_rows[j] = (const char *)p->k_pages + start;
        for (int64_t d = 0; d < dim; d += LANES)
            store_f32(w->values + j * width + d,
                      load_some((const char *)p->v_pages + start, d, dim - d, is_bf16));
        offset++;
        if (offset == p->page_size) {
            offset = 0;
            page++;
        }
    }
    for (int64_t j = count; j < round_up(count, LANES); j++)
        k_rows[j] = k_rows[count - 1]; /* a score that nobody sees */
    for (int64_t group = 0; group < count; group += LANES)
        pack_keys(k_rows + group, dim, w->keys + group, is_bf16);
}

/* Turn a row's scores into weights and bring what it has summed to the new maximum. */
INLINE void soften(const struct workspace *w, float *weights, int64_t row, int64_t visible,
                   int64_t width)
{
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 scores[BLOCK / LANES], top = splat(w->maxima[row]);
    for (int i = 0; i < BLOCK / LANES; i++) {
        i32x16 is_visible = lane + i * LANES < (int32_t)visible;
        scores[i] = select_lanes(is_visible, load_f32(weights + i * LANES), splat(-INFINITY));
        top = select_lanes(scores[i] > top, scores[i], top);
    }
    float maximum = largest_lane(top);
    f32x16 decay = exp_nonpositive(splat(w->maxima[row] - maximum));
    f32x16 denominator = load_f32(w->denominator + row * LANES) * decay;
    for (int i = 0; i < BLOCK / LANES; i++) {
        i32x16 is_visible = lane + i * LANES < (int32_t)visible;
        f32x16 weight = exp_nonpositive(scores[i] - maximum);
        weight = select_lanes(is_visible, weight, splat(0.0f));
        denominator += weight;
        store_f32(weights + i * LANES, weight);
    }
    store_f32(w->denominator + row * LANES, denominator);
    w->maxima[row] = maximum;
    for (int64_t d = 0; d < width; d += LANES)
        store_f32(w->sums + row * width + d, load_f32(w->sums + row * width + d) * decay);
}

/* Attend with `num_rows` rows to the packed block; all of them see its first position. */
static void attend_tile(const struct problem *p, const struct workspace *w, int64_t first_row,
                        int64_t num_rows, int64_t first_visible)
{
    int64_t width = row_width(p), dim = p->head_dim, group = group_size(p), visible[TILE_ROWS];
    for (int64_t i = 0; i < num_rows; i++)
        visible[i] = smaller(first_visible + (first_row + i) / group - first_row / group, BLOCK);
    memset(w->weights, 0, TILE_ROWS * BLOCK * sizeof(float));
    for (int64_t j = 0; j < visible[num_rows - 1]; j += TILE_COLUMNS)
        add_product(num_rows, w->weights + j, BLOCK, w->queries + first_row * width,
                    width, w->keys + j, BLOCK, dim);
    for (int64_t i = 0; i < num_rows; i++)
        soften(w, w->weights + i * BLOCK, first_row + i, visible[i], width);
    for (int64_t d = 0; d < width; d += TILE_COLUMNS) {
        float *sums = w->sums + first_row * width + d;
        add_product(num_rows, sums, width, w->weights, BLOCK, w->values + d, width, visible[0]);
        for (int64_t i = 0; i < num_rows; i++)
            add_product(1, sums + i * width, width, w->weights + i * BLOCK + visible[0], BLOCK,
                        w->values + visible[0] * width + d, width, visible[i] - visible[0]);
    }
}

static void load_queries(const struct problem *p, const struct task *task,
                         const struct workspace *w)
{
    int64_t dim = p->head_dim, width = row_width(p), group = group_size(p);
    int64_t num_rows = task->num_tokens * group;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t token = task->first_token + row / group, head = task->kv_head * group + row % group;
        int64_t from = token * p->q_token_stride + head * p->q_head_stride;
        for (int64_t d = 0; d < dim; d += LANES)
            store_f32(w->queries + row * width + d,
                      load_some(p->q, from + d, dim - d, p->is_bf16) * (float)p->scale);
        w->maxima[row] = -INFINITY;
    }
    memset(w->sums, 0, (size_t)(num_rows * width) * sizeof(float));
    memset(w->denominator, 0, (size_t)(num_rows * LANES) * sizeof(float));
}

static void store_output(const struct problem *p, const struct task *task,
                         const struct workspace *w)
{
    int64_t dim = p->head_dim, group = group_size(p), width = row_width(p);
    for (int64_t row = 0; row < task->num_tokens * group; row++) {
        int64_t token = task->first_token + row / group, head = task->kv_head * group + row % group;
        float total = sum_lanes(load_f32(w->denominator + row * LANES));
        for (int64_t d = 0; d < dim; d += LANES)
            store_some(p->out, (token * p->num_heads + head) * dim + d, dim - d, p->is_bf16,
                       load_f32(w->sums + row * width + d) / total);
    }
}

static void attend(const struct problem *p, const struct task *task, const struct workspace *w)
{
    int64_t group = group_size(p), num_rows = task->num_tokens * group;
    int64_t num_positions = task->first_position + task->num_tokens;
    load_queries(p, task, w);
    for (int64_t start = 0; start < num_positions; start += BLOCK) {
        int64_t count = smaller(BLOCK, num_positions - start);
        if (p->is_bf16)
            pack(p, task, w, start, count, true);
        else
            pack(p, task, w, start, count, false);
        int64_t hidden = start - task->first_position; /* tokens before the block */
        for (int64_t row = hidden > 0 ? hidden * group : 0; row < num_rows; row += TILE_ROWS)
            attend_tile(p, w, row, smaller(TILE_ROWS, num_rows - row), row / group - hidden + 1);
    }
    store_output(p, task, w);
}

/* Find task number `index`, counted over sequences, then their runs of tokens, then KV heads. */
static struct task find_task(const struct problem *p, int64_t tokens, int64_t index)
{
    int64_t sequence = 0;
    for (;; sequence++) {
        int64_t here = round_up(p->sequences[sequence * 3 + 1], tokens) / tokens * p->num_kv_heads;
        if (index < here)
            break;
        index -= here;
    }
    const int64_t *row = p->sequences + sequence * 3;
    int64_t offset = index / p->num_kv_heads * tokens;
    return (struct task){
        .pages = p->page_table + sequence * p->max_pages,
        .first_token = row[0] + offset,
        .num_tokens = smaller(tokens, row[1] - offset),
        .first_position = row[2] - row[1] + offset,
        .kv_head = index % p->num_kv_heads,
    };
}

/* Cut one allocation into the workspace; return its start, NULL if there is none. */
static float *make_workspace(const struct problem *p, int64_t tokens, struct workspace *w)
{
    int64_t rows = tokens * group_size(p), dim = p->head_dim, width = row_width(p);
    int64_t sizes[] = {rows * width, rows * width,  rows,
                       rows * LANES, dim * BLOCK, BLOCK * width, TILE_ROWS * BLOCK};
    float **parts[] = {&w->queries, &w->sums,   &w->maxima, &w->denominator,
                       &w->keys,    &w->values, &w->weights};
    int64_t total = 0;
    for (int i = 0; i < 7; i++)
        total += round_up(sizes[i], LANES);
    float *memory = aligned_alloc(64, (size_t)total * sizeof(float));
    if (memory == NULL)
        return NULL;
    memset(memory, 0, (size_t)total * sizeof(float)); /* values' padding is read, never written */
    float *next = memory;
    for (int i = 0; i < 7; i++) {
        *parts[i] = next;
        next += round_up(sizes[i], LANES);
    }
    return memory;
}

/* Return 0, or 1 if there was no memory: then the output is not complete. */
int topwork_attention(const struct problem *p)
{
    int64_t tokens = task_tokens(p), num_tasks = 0;
    int failed = 0;
    for (int64_t i = 0; i < p->num_sequences; i++)
        num_tasks += round_up(p->sequences[i * 3 + 1], tokens) / tokens * p->num_kv_heads;
    int num_threads = (int)smaller(p->num_threads, num_tasks > 0 ? num_tasks : 1);
    (void)num_threads; /* without OpenMP */
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        struct workspace w;
        float *memory = make_workspace(p, tokens, &w);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tasks; i++) {
            struct task task = find_task(p, tokens, i);
            if (memory != NULL)
                attend(p, &task, &w);
            else
#pragma omp atomic write
                failed = 1;
        }
        free(memory);
    }
    return failed;
}
