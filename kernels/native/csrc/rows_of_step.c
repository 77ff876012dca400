/* What a step is made of before its program runs: where its rows lie, and what goes in.
 *
 * Each is little work, which Python or a library of tensors takes longer to begin than to do.
 */
#include <string.h>

#include "simd/vector.h"

/* RowLayout of library.py: the new rows of some sequences, sequence by sequence, and their pages.
 * What is behind `page_size` is written. */
struct row_layout {
    const int64_t *starts;       /* [S + 1]: of each sequence, its first row; and T at the end */
    const int64_t *lengths;      /* [S]: of each sequence, its positions, the new rows included */
    const int32_t *const *pages; /* [S]: of each sequence, its pages */
    int64_t num_sequences, max_pages, page_size;
    int64_t *page_table; /* [S, max_pages], zero past a sequence's pages */
    int64_t *kv_loc;     /* [T]: page * page_size + offset */
    int64_t *positions;  /* [T] */
    int64_t *sequences;  /* [S, 3]: first row, rows, positions */
};

void topwork_lay_out_rows(const struct row_layout *p)
{
    for (int64_t i = 0; i < p->num_sequences; i++) {
        int64_t first = p->starts[i], stop = p->starts[i + 1], length = p->lengths[i];
        int64_t num_pages = (length + p->page_size - 1) / p->page_size;
        int64_t *row = p->page_table + i * p->max_pages, *sequence = p->sequences + i * 3;
        for (int64_t page = 0; page < p->max_pages; page++)
            row[page] = page < num_pages ? p->pages[i][page] : 0;
        for (int64_t at = first; at < stop; at++) {
            int64_t position = length - (stop - at);
            p->positions[at] = position;
            p->kv_loc[at] = row[position / p->page_size] * p->page_size + position % p->page_size;
        }
        sequence[0] = first;
        sequence[1] = stop - first;
        sequence[2] = length;
    }
}

struct look_up {
    float *out;         /* [T, H] */
    const int64_t *ids; /* [T] */
    const void *table;  /* [V, H] */
    int64_t num_rows, table_rows, width, is_bf16;
    float scale;
};

/* Write rows of a table by their numbers, as floats times `scale`. Return 1, and read nothing of
 * it, where it has no such row. */
int topwork_look_up(const struct look_up *p)
{
    enum { AHEAD = 4 }; /* rows that are asked for before their use: they lie anywhere */
    int64_t width = p->width, size = width * (p->is_bf16 ? 2 : 4);
    const char *table = p->table;
    for (int64_t row = 0; row < p->num_rows; row++)
        if (p->ids[row] < 0 || p->ids[row] >= p->table_rows)
            return 1;
    for (int64_t row = -AHEAD; row < p->num_rows; row++) {
        for (int64_t at = 0; row + AHEAD < p->num_rows && at < size; at += LINE)
            prefetch(table + p->ids[row + AHEAD] * size, at);
        if (row < 0)
            continue;
        const char *from = table + p->ids[row] * size;
        float *to = p->out + row * width;
        for (int64_t i = 0; i < width; i += LANES) {
            f32v x = load_some(from, i, width - i, p->is_bf16);
            store_some(to, i, width - i, false, x * p->scale);
        }
    }
    return 0;
}
