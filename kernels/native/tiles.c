/* Leave to use tiles, which a process on Linux has to ask for once; its threads have it then.
 *
 * Knows nothing of products.
 */
#define _GNU_SOURCE /* syscall */
#include "tiles.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 }; /* of arch_prctl */

static int is_granted;

static void ask(void)
{
    is_granted = HAS_TILES && syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
}

int topwork_has_tiles(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ask);
    return is_granted;
}
