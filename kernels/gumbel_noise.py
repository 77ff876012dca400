"""Counter-based noise: what makes a drawn token a function of (logits, parameters, seed, position).

There is no generator and no state, so a stream that resumes elsewhere draws the same tokens.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64: the stream's stride and its two mixing multipliers
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_VECTOR = 64  # noise is computed in whole vectors, so that no id falls into a scalar tail


def gumbel_noise(seed: int, position: int, num_tokens: int) -> Tensor:
    """Return standard Gumbel noise for token ids [0, num_tokens) as [num_tokens] float32.

    Args:
        seed: 64 bits, unsigned.
        position: of the token to be drawn in its sequence.
        num_tokens: how many ids; the noise of an id does not depend on it.
    """
    padded = num_tokens + -num_tokens % _VECTOR
    return _gumbel(seed, position, torch.arange(padded))[:num_tokens]


def gumbel_noise_at(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Return the entries of `gumbel_noise` at `token_ids` [n] int64, as [n] float32."""
    num_ids = token_ids.shape[0]
    padded = torch.nn.functional.pad(token_ids, (0, -num_ids % _VECTOR))
    return _gumbel(seed, position, padded)[:num_ids]


def gumbel_argmax(scores: Tensor, seed: int, position: int) -> int:
    """Return the id of the largest score [V] float32 plus noise, the lowest of equals.

    `scores` may be changed. At least one is finite, none is NaN.
    """
    return int(scores.add_(gumbel_noise(seed, position, scores.shape[0])).argmax())


def hash_tokens(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Return 64 random bits for each token id [n] int64: splitmix64's outputs id + 1."""
    stream = stream_of(seed, position)
    x = token_ids.add(1).mul_(_signed(_GOLDEN)).add_(_signed(stream))
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_signed(_MIX_A))
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_signed(_MIX_B))
    return x.bitwise_xor_(_shift_right(x, 31))


def stream_of(seed: int, position: int) -> int:
    """Return where the outputs of splitmix64 for a position begin."""
    return _mix(_mix(seed) ^ _mix(position ^ _GOLDEN))


def _gumbel(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Return -log(-log(u)) with u in the open unit interval, 53 bits fine; float64 inside."""
    bits = hash_tokens(seed, position, token_ids)
    uniform = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().float()


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right as if it were unsigned."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: int) -> int:
    """Return splitmix64's finaliser of one 64-bit integer."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MIX_A) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_B) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    """Return the int64 with the same 64 bits."""
    return x - (1 << 64) if x >> 63 else x
