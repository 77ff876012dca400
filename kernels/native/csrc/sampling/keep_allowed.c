/* What may not be drawn is taken out of a row of logits. */
#include "simd/vector.h"

/* Sets the logits [num_tokens] of tokens whose byte in allowed is 0 to minus infinity. */
int topwork_keep_allowed(float *logits, const uint8_t *allowed, int64_t num_tokens)
{
    for (int64_t i = 0; i < num_tokens; i++)
        logits[i] = allowed[i] ? logits[i] : -__builtin_inff();
    return 0;
}
