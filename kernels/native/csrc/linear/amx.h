/* What products by AMX have in common: tiles of up to 16 rows of 64 bytes.
 *
 * A product of tiles adds 32 products of bfloat16 to each of 16 x 16 sums, in 16 cycles; a dot
 * product of vectors adds two to each of 16, in one or two. Of the 32, AMX adds up those with even
 * numbers and those with odd ones apart, then both to the sum: other bits than those of dot
 * products, the same for an element whatever stands beside it.
 */
#ifndef TOPWORK_LINEAR_AMX_H
#define TOPWORK_LINEAR_AMX_H

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd/words.h"

#if HAS_DOTS && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

enum {
    TILE_ROWS = 16,
    TILE_LINE = 64,   /* bytes of a row */
    TILE_INPUTS = 32, /* bfloat16 of a row */
    NUM_TILES = 8,
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

#else

INLINE void release_tiles(void) {}

#endif
#endif
