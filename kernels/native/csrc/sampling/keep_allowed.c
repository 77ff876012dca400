/* What may not be drawn is taken out of a row of logits. */
#include <string.h>

#include "simd/vector.h"

/* Sets the logits of at most 64 tokens whose bit is 0 to minus infinity. */
static void keep_word(float *logits, uint64_t bits, int64_t count)
{
    for (int64_t first = 0; first < count; first += 8, bits >>= 8) {
        uint8_t byte = bits & 0xff;
        if (byte == 0 && count - first >= 8) {
            for (int64_t i = 0; i < 8; i++)
                logits[first + i] = -__builtin_inff();
        } else if (byte != 0xff) {
            for (int64_t i = 0; i < 8 && first + i < count; i++)
                if (!(byte >> i & 1))
                    logits[first + i] = -__builtin_inff();
        }
    }
}

/* Sets the logits [num_tokens] of tokens whose bit in allowed is 0 to minus infinity. Most tokens
   have neighbours that may come, or may not, as they do: many are looked at as one. */
int topwork_keep_allowed(float *logits, const uint8_t *allowed, int64_t num_tokens)
{
    for (int64_t first = 0; first < num_tokens; first += 64) {
        int64_t count = num_tokens - first < 64 ? num_tokens - first : 64;
        uint64_t bits = 0; /* little-endian, as the loops here assume; x86 and ARM are */
        memcpy(&bits, allowed + first / 8, (size_t)((count + 7) / 8));
        if (~bits != 0)
            keep_word(logits + first, bits, count);
    }
    return 0;
}
