"""The Gumbel noise of kernels.gumbel_noise on a GPU, and the best of a tile under it.

The hash is bit for bit the CPU's. The largest score + noise is found at the price of float32: a
rough noise for all tokens, the CPU's float64 formula for the few that may be the best. A token
comes with its depth, which is how far its score lies below the row's best.

A value and its token id are packed into one int64 whose order is: larger value, then lower id; NaN
above all. So a maximum of packed integers is the answer whatever the order it is taken in.
"""

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # splitmix64, as in kernels.gumbel_noise
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)
_HALF_ULP = tl.constexpr(2.0**-53)
_ULP = tl.constexpr(2.0**-52)
# The rough noise is off by less than 1e-5 where a winner can lie; this is far more, and still
# hardly ever lets a second token through.
_MARGIN = tl.constexpr(2.0**-10)
_MAX_INT = tl.constexpr(0x7FFFFFFF)
NOTHING = tl.constexpr(-(1 << 63))  # packed: below any value, NaN excepted by its key


@triton.jit
def order_key(values):
    """Return int32 in the order of float32 values: zeros alike, NaN on top."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & _MAX_INT)
    return tl.where(values == values, key, _MAX_INT)


@triton.jit
def value_of_key(key):
    """Return the float32 that `order_key` made `key` of."""
    return (key ^ ((key >> 31) & _MAX_INT)).to(tl.float32, bitcast=True)


@triton.jit
def pack(values, ids):
    """Return one int64 for each float32 value and its id."""
    return pack_keys(order_key(values), ids)


@triton.jit
def pack_keys(keys, ids):
    """Do `pack` for values that are keys already."""
    return (keys.to(tl.int64) << 32) + (ids ^ _MAX_INT)


@triton.jit
def value_of(packed):
    """Return the value in `packed`, -inf if that is NOTHING."""
    value = value_of_key((packed >> 32).to(tl.int32))
    return tl.where(packed == NOTHING, float("-inf"), value)


@triton.jit
def id_of(packed):
    """Return the id in `packed`, which is not NOTHING."""
    return (packed & 0xFFFFFFFF).to(tl.int32) ^ _MAX_INT


@triton.jit
def stream_of(seed, position):
    """Return the uint64 that a row's hashes start from, for int64 seed and position."""
    mixed = _step(position.to(tl.uint64, bitcast=True) ^ _GOLDEN)
    return _step(_step(seed.to(tl.uint64, bitcast=True)) ^ mixed)


@triton.jit
def hash_tokens(stream, ids):
    """Return 64 random bits for each id."""
    return _finalise((ids + 1).to(tl.uint64) * _GOLDEN + stream)


@triton.jit
def _step(x):
    return _finalise(x + _GOLDEN)


@triton.jit
def _finalise(x):
    x = (x ^ (x >> 30)) * _MIX_A
    x = (x ^ (x >> 27)) * _MIX_B
    return x ^ (x >> 31)


@triton.jit
def exact_noise(bits):
    """Return -log(-log(u)) as the CPU does: in float64, rounded once to float32."""
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * _ULP
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def rough_noise(bits):
    """Return the noise in float32, good where u is close to 1 too: there lie the winners."""
    steps = (bits >> 12).to(tl.int64)
    uniform = steps.to(tl.float32) * _ULP + _HALF_ULP
    rest = ((1 << 52) - 1 - steps).to(tl.float32) * _ULP + _HALF_ULP  # 1 - u, without its rounding
    series = rest * (1.0 + rest * (0.5 + rest * (1.0 / 3.0 + rest * 0.25)))
    return -tl.log(tl.where(rest < 0.0625, series, -tl.log(uniform)))


@triton.jit
def gumbel_max(depth, ids, is_kept, stream, best):
    """Return the larger of `best` and the packed best noise - depth of the kept tokens.

    Looks in order of ids at the tokens whose rough value is close to the best; most often one.

    Args:
        depth: a tile of float32, finite and not negative where kept.
        ids: int32, all different where kept.
        is_kept: of the same shape.
        stream: uint64.
        best: packed, what was found elsewhere.
    """
    rough = tl.where(is_kept, rough_noise(hash_tokens(stream, ids)) - depth, float("-inf"))
    floor = tl.maximum(tl.max(rough), value_of(best)) - _MARGIN
    is_near = is_kept & (rough >= floor)
    at = tl.min(tl.where(is_near, ids, _MAX_INT))
    while at < _MAX_INT:
        its_depth = tl.max(tl.where(is_near & (ids == at), depth, 0.0))
        best = tl.maximum(best, pack(exact_noise(hash_tokens(stream, at)) - its_depth, at))
        at = tl.min(tl.where(is_near & (ids > at), ids, _MAX_INT))
    return best
