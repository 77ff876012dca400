/* What products by AMX have in common: tiles of up to 16 rows of 64 bytes.
 *
 * In a product of tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights: two tiles of outputs for
 * two of inputs, or for one.
 *
 * Of bfloat16 it adds 32 products to each of 16 x 16 sums, in 16 cycles; a dot product of vectors
 * adds two to each of 16, in one or two. Of the 32, AMX adds up those with even numbers and those
 * with odd ones apart, then both to the sum: other bits than those of dot products, the same for an
 * element whatever stands beside it.
 */
#ifndef TOPWORK_SIMD_AMX_H
#define TOPWORK_SIMD_AMX_H

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd/words.h"

#if HAS_DOTS && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#if HAS_TILES && defined(__AMX_INT8__) && defined(__AVX512VNNI__) /* see INPUT_BYTES */
#define HAS_BYTE_TILES 1
#else
#define HAS_BYTE_TILES 0
#endif

enum {
    TILE_ROWS = 16,
    TILE_LINE = 64,   /* bytes of a row */
    TILE_INPUTS = 32, /* bfloat16 of a row */
    NUM_TILES = 8,
    TILE_STEPS = 16, /* words of a line: the rows of a tile of weights */
};

/* How many rows a thread's tiles of inputs have, and of how many bytes, as it has told them. */
struct tile_rows {
    int64_t first, second, num_bytes;
};

enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 }; /* of arch_prctl */

static int is_amx_granted;

static void ask_for_amx(void)
{
    is_amx_granted = HAS_TILES && syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

/* Tell whether products are computed in tiles in this process: on Linux it has to ask once for
 * leave to use them, and its threads have it then. */
static int may_use_amx(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ask_for_amx);
    return is_amx_granted;
}

/* Tell whether products of bytes are. */
INLINE bool may_use_byte_tiles(void) { return HAS_BYTE_TILES && may_use_amx(); }

#if HAS_TILES

/* The form of each tile. */
struct tile_shape {
    uint8_t palette, start_row, reserved[14];
    uint16_t line_bytes[16];
    uint8_t rows[16];
};

/* The compiler does not know that tiles are loaded from memory, and stored there. */
INLINE void settle_memory(void) { __asm__ volatile("" ::: "memory"); }

INLINE void release_tiles(void) { _tile_release(); }

/* Tell the tiles how many rows of inputs and of sums there are, and how many bytes of inputs. */
static void shape_tiles(struct tile_rows *told, int64_t first_rows, int64_t second_rows,
                        int64_t num_bytes)
{
    struct tile_rows rows = {first_rows, second_rows, num_bytes};
    struct tile_shape shape = {.palette = 1};
    if (memcmp(told, &rows, sizeof rows) == 0)
        return;
    *told = rows;
    for (int tile = 0; tile < NUM_TILES; tile++) {
        bool is_input = tile == 4 || tile == 5, is_second = tile == 2 || tile == 3 || tile == 5;
        shape.line_bytes[tile] = (uint16_t)(is_input ? num_bytes : TILE_LINE);
        shape.rows[tile] = (uint8_t)(tile >= 6   ? num_bytes / 4
                                     : is_second ? second_rows
                                                 : first_rows);
        if (shape.rows[tile] == 0)
            shape.rows[tile] = 1; /* not used then */
    }
    __asm__ volatile("" : : "m"(shape)); /* GCC knows only of the first bytes that are read */
    _tile_loadconfig(&shape);
}

/* Return where `num_read` bytes can be read of which `num_bytes` are there: behind them, where
 * there may be nobody's memory, a copy has zeros, up to `size`. */
INLINE const char *readable(const char *from, int64_t num_bytes, int64_t num_read, char *copy,
                            int64_t size)
{
    if (num_bytes >= num_read)
        return from;
    memcpy(copy, from, (size_t)num_bytes);
    memset(copy + num_bytes, 0, (size_t)(size - num_bytes));
    settle_memory();
    return copy;
}

/* Begin with the sums of all tiles. */
INLINE void zero_tiles(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

/* Store the sums of all tiles, of 4 bytes each. */
INLINE void store_tiles(bool has_second, void *sums, int64_t row_bytes)
{
    char *to = sums;
    _tile_stored(0, to, row_bytes);
    _tile_stored(1, to + TILE_LINE, row_bytes);
    if (has_second) {
        to += TILE_ROWS * row_bytes;
        _tile_stored(2, to, row_bytes);
        _tile_stored(3, to + TILE_LINE, row_bytes);
    }
    settle_memory();
}

#else

INLINE void release_tiles(void) {}

#endif
#endif
