"""Times of the small kernels, sampling, copies of pages and the batch-invariant product.

Shapes: T rows, H hidden, I intermediate, S sampled rows, V vocabulary, N outputs, K inputs.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gpu.activation import silu_and_mul
from kernels.gpu.batch_invariant.linear import batch_invariant_linear
from kernels.gpu.norm import add_rms_norm
from kernels.gpu.page_copy import clear_pages, fork_pages, gather_pages, scatter_pages
from kernels.gpu.rope import rope_and_write
from kernels.gpu.sampling.sampler import argmax, sample
from tests.gpu.bench import line, matmul_floor, moved_floor, read_floor
from tests.gpu.paged import Heads, filled_pages
from tests.gpu.place import Place
from tests.gpu.report import Case, Finding
from tests.gpu.timing import Call, num_sets

_BF16 = torch.bfloat16
_EPS = 1e-5
_SAMPLES = {  # (top_k, top_p)
    "all tokens": (0, 1.0),
    "top_p 0.9": (0, 0.9),
    "top_k 50": (50, 1.0),
}


def cases(place: Place) -> Iterator[Case]:
    for rows, goal in ((2048, 0.85), (64, None)):
        count = place.pick(rows, 3)
        yield f"norm with residual, {rows} rows", lambda n=count, g=goal: norm(place, n, g)
        yield f"rope and KV write, {rows} rows", lambda n=count, g=goal: rope(place, n, g)
        yield f"activation, {rows} rows", lambda n=count, g=goal: activation(place, n, g)
    yield "best of 64 x 128,256", lambda: best_rows(place)
    for kind in _SAMPLES:
        yield f"sample 64 x 128,256, {kind}", lambda kind=kind: sample_rows(place, kind)
    for kind in ("gather", "scatter", "fork", "clear"):
        yield f"{kind} 32 pages of all layers", lambda kind=kind: page_copy(place, kind)
    for rows in (1, 64, 2048):
        for name, shape in (("gate_up", (28_672, 4096)), ("down", (4096, 14_336))):
            args = (place, place.pick(rows, 2), *place.pick(shape, (32, 32)))
            yield f"batch-invariant product {name}, {rows} rows", lambda args=args: product(*args)


def norm(place: Place, num_rows: int, goal: float | None) -> Finding:
    hidden = place.pick(4096, 72)
    num_bytes = num_rows * hidden * (2 + 4 + 4 + 2)
    weight = place.randn(hidden, dtype=_BF16)
    sets = [
        (place.randn(num_rows, hidden, dtype=_BF16), place.randn(num_rows, hidden))
        for _ in range(_count(place, num_bytes))
    ]
    calls = [lambda x=x, r=r: add_rms_norm(x, r, weight, _EPS) for x, r in sets]
    beside = {"rms_norm alone": lambda: [lambda x=x: _torch_norm(x, weight) for x, _ in sets]}
    return line(place, calls, moved_floor(place, num_bytes), at_least=goal, beside=beside)


def rope(place: Place, num_rows: int, goal: float | None) -> Finding:
    heads = place.pick(Heads(32, 8, 128), Heads(4, 2, 32))
    page, num_all = place.pick(64, 16), heads.num_heads + 2 * heads.num_kv_heads
    num_bytes = 2 * num_rows * num_all * heads.head_dim * 2
    angles = place.randn(num_rows, heads.head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.arange(num_rows, device=place.device)

    def make() -> Call:
        k, v = filled_pages(place, heads, page, -(-num_rows // page) + 1)
        qkv = place.randn(num_rows, num_all, heads.head_dim, dtype=_BF16)
        args = (qkv, heads.num_heads, cos, sin, positions, positions, k, v, None, None, _EPS)
        return lambda: rope_and_write(*args)

    calls = [make() for _ in range(_count(place, num_bytes))]
    return line(place, calls, moved_floor(place, num_bytes), at_least=goal)


def activation(place: Place, num_rows: int, goal: float | None) -> Finding:
    width = place.pick(14_336, 72)
    num_bytes = 3 * num_rows * width * 2
    sets = [place.randn(num_rows, 2 * width, dtype=_BF16) for _ in range(_count(place, num_bytes))]
    calls = [lambda x=x: silu_and_mul(x) for x in sets]
    beside = {"silu, then mul": lambda: [lambda x=x: _torch_activation(x) for x in sets]}
    return line(place, calls, moved_floor(place, num_bytes), at_least=goal, beside=beside)


def best_rows(place: Place) -> Finding:
    sets, num_bytes = _logits(place)
    calls = [lambda x=x: argmax(x) for x in sets]
    beside = {"max": lambda: [lambda x=x: x.max(-1) for x in sets]}
    return line(place, calls, read_floor(place, num_bytes), at_most_us=30.0, beside=beside)


def sample_rows(place: Place, kind: str) -> Finding:
    sets, num_bytes = _logits(place)
    count, device, (top_k, top_p) = sets[0].shape[0], place.device, _SAMPLES[kind]
    args = (
        torch.full((count,), 0.8, device=device),
        torch.full((count,), top_k, dtype=torch.int32, device=device),
        torch.full((count,), top_p, device=device),
        torch.zeros(count, device=device),
        torch.arange(count, device=device) * 7919,
        torch.arange(count, device=device),
    )
    calls = [lambda x=x: sample(x, *args) for x in sets]
    return line(place, calls, read_floor(place, num_bytes), at_most_us=30.0)


def page_copy(place: Place, kind: str) -> Finding:
    """Move 32 pages of 64 in the pool of a Llama-3.1-8B."""
    count = place.pick(32, 2)
    shape = place.pick((32, 2, 2 * count, 8, 64, 128), (1, 2, 2 * count, 1, 16, 8))
    pool = torch.empty(shape, dtype=_BF16, device=place.device).normal_()
    order = torch.randperm(2 * count).int().to(place.device)
    some, others = order[:count].contiguous(), order[count:].contiguous()
    staged = torch.empty((count, *shape[:2], *shape[3:]), dtype=_BF16, device=place.device)
    whole = torch.full((count,), shape[4], dtype=torch.int32, device=place.device)
    gather_pages(pool, some, staged)
    calls: dict[str, Callable[[], None]] = {
        "gather": lambda: gather_pages(pool, some, staged),
        "scatter": lambda: scatter_pages(staged, pool, others),
        "fork": lambda: fork_pages(pool, some, others, whole),
        "clear": lambda: clear_pages(pool, others),
    }
    num_bytes = staged.nbytes * (1 if kind == "clear" else 2)
    return line(place, [calls[kind]], moved_floor(place, num_bytes))


def product(place: Place, num_rows: int, outputs: int, inputs: int) -> Finding:
    """Time the product whose rows keep their bits beside cuBLAS's."""
    num_bytes = 2 * (outputs * inputs + num_rows * (inputs + outputs))
    sets = [
        (
            place.randn(num_rows, inputs, dtype=_BF16),
            place.randn(outputs, inputs, dtype=_BF16, scale=inputs**-0.5),
        )
        for _ in range(_count(place, num_bytes))
    ]
    floor = max(read_floor(place, num_bytes), matmul_floor(place, 2 * num_rows * outputs * inputs))
    calls = [lambda x=x, w=w: batch_invariant_linear(x, w, None) for x, w in sets]
    beside = {"F.linear": lambda: [lambda x=x, w=w: F.linear(x, w) for x, w in sets]}
    return line(place, calls, floor, beside=beside)


def _logits(place: Place) -> tuple[list[Tensor], int]:
    """Return sets of logits as steep as a model's, and the bytes of one."""
    rows, vocab = place.pick(64, 2), place.pick(128_256, 300)
    count = _count(place, rows * vocab * 4)
    return [place.randn(rows, vocab, scale=3.0) for _ in range(count)], rows * vocab * 4


def _count(place: Place, num_bytes: int) -> int:
    return place.pick(num_sets(num_bytes), 1)


def _torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[1],), weight, _EPS)


def _torch_activation(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
