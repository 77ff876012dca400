"""The small kernels on the device: norm, activation, rope with its KV write, copies of pages.

Shapes: T rows, H hidden, I intermediate, D head_dim, P pages, L layers.
"""

from collections.abc import Iterator
from functools import partial

import torch

from kernels import reference
from kernels.gpu.activation import (
    gate_heads,
    gelu_tanh_and_mul,
    silu_and_mul,
    swigluoai_and_mul,
)
from kernels.gpu.async_copy import send_in_pieces
from kernels.gpu.backend import GpuKernels
from kernels.gpu.norm import add_rms_norm
from kernels.gpu.page_copy import clear_pages, fork_pages, gather_pages, scatter_pages
from kernels.gpu.rope import rope_and_write
from kernels.gpu.wide_norm import square_sums, wide_norm
from tests.gpu.checks import DTYPES, GATES, expect_near, expect_same, expect_untouched
from tests.gpu.place import Place
from tests.gpu.report import Case, Finding

EPS = 1e-5


def cases(place: Place) -> Iterator[Case]:
    for name, dtype in DTYPES.items():
        if place.is_dry and name != "bfloat16":
            continue
        for hidden in place.pick([576, 4096, 72], [72]):
            args = (place, dtype, hidden)
            yield f"norm {name} hidden {hidden}", lambda args=args: norm(*args)
        for width in place.pick([1536, 14_336, 72], [72]):
            args = (place, dtype, width)
            yield f"activation {name} width {width}", lambda args=args: activation(*args)
        for head_dim, has_norms in place.pick(
            [(64, False), (128, False), (128, True)], [(64, True)]
        ):
            title = f"rope {name} D{head_dim}{' with norms' if has_norms else ''}"
            yield title, lambda args=(place, dtype, head_dim, has_norms): rope(*args)
        for head_dim in place.pick([64, 128], [64]):
            args = (place, dtype, head_dim)
            yield f"wide norm {name} D{head_dim}", lambda args=args: norm_of_all_heads(*args)
    yield "copies of pages", lambda: page_copies(place)
    yield "pages to the host and back", lambda: host_pages(place)
    yield "a tensor in pieces", lambda: in_pieces(place)


def in_pieces(place: Place) -> Finding:
    """A tensor that is sent piece by piece, the last of them short."""
    host = torch.randn(place.pick(10_000_003, 30))
    host = host if place.is_dry else host.pin_memory()
    expect_same(send_in_pieces(host, place.device).cpu(), host, "a tensor in pieces")
    return {"note": f"{host.nbytes:,} bytes"}


def norm(place: Place, dtype: torch.dtype, hidden: int) -> Finding:
    num_rows = place.pick(1000, 3)
    x, residual = place.randn(num_rows, hidden, dtype=dtype), place.randn(num_rows, hidden)
    weight = place.randn(hidden, dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    wanted = x.double() + residual.double()
    near = reference.rms_norm(wanted, weight.double(), EPS)
    errors = [expect_near(normed, near, GATES[dtype]), expect_near(total, wanted, 1e-6)]
    plain = reference.rms_norm(x.double(), weight.double(), EPS)
    first, _ = add_rms_norm(x, None, weight, EPS)
    errors.append(expect_near(first, plain, GATES[dtype]))
    for i in (0, num_rows - 1):
        alone, _ = add_rms_norm(x[i : i + 1], residual[i : i + 1], weight, EPS)
        expect_same(alone, normed[i : i + 1], "a row alone")
    return {"error": max(errors), "gate": GATES[dtype]}


def activation(place: Place, dtype: torch.dtype, width: int) -> Finding:
    num_rows = place.pick(300, 3)
    gate_up = place.randn(num_rows, 2 * width, dtype=dtype, scale=3.0)
    errors = []
    for gate, meant in (
        (silu_and_mul, reference.silu_and_mul),
        (gelu_tanh_and_mul, reference.gelu_tanh_and_mul),
        (
            partial(swigluoai_and_mul, alpha=1.702, limit=7.0),
            partial(reference.swigluoai_and_mul, alpha=1.702, limit=7.0),
        ),
    ):
        out = gate(gate_up)
        errors.append(expect_near(out, meant(gate_up.double()), GATES[dtype]))
        for i in (0, num_rows - 1):
            expect_same(gate(gate_up[i : i + 1]), out[i : i + 1], "a row alone")
    attended = place.randn(num_rows, 1, width, dtype=dtype)
    out, alone = attended.clone(), attended[:1].clone()
    gate_heads(out, gate_up[:, :width])
    gate_heads(alone, gate_up[:1, :width])
    meant = reference.gate_heads(attended.double(), gate_up[:, :width].double())
    errors.append(expect_near(out, meant, GATES[dtype]))
    expect_same(alone, out[:1], "a row alone")
    return {"error": max(errors), "gate": GATES[dtype]}


def norm_of_all_heads(place: Place, dtype: torch.dtype, head_dim: int) -> Finding:
    num_heads, num_kv_heads, num_rows = 12, 3, place.pick(500, 3)
    qkv = place.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    parts = qkv.double().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k, v = (part.flatten(1) for part in parts)
    widths = q.shape[1], k.shape[1]
    norms = [place.randn(width, dtype=dtype) for width in widths]
    alone = qkv[:1].clone()
    for rows in (qkv, alone):
        sums = square_sums(rows, num_heads, num_kv_heads, counts_kv=True)
        wide_norm(rows, sums, norms[0], norms[1], widths, EPS)
    normed = [reference.rms_norm(x, w.double(), EPS) for x, w in zip((q, k), norms, strict=True)]
    error = expect_near(qkv.flatten(1), torch.cat([*normed, v], dim=1), GATES[dtype])
    expect_same(alone, qkv[:1], "a row alone")
    return {"error": error, "gate": GATES[dtype]}


def rope(place: Place, dtype: torch.dtype, head_dim: int, has_norms: bool) -> Finding:
    num_heads, num_kv_heads, page = 12, 3, place.pick(64, 16)
    num_rows, num_pages = place.pick(500, 3), place.pick(20, 2)
    angles = place.randn(1000, head_dim // 2, scale=3.0)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 1000, (num_rows,), device=place.device)
    kv_loc = torch.randperm(num_pages * page, device=place.device)[:num_rows]
    kv_loc[1] = -1
    qkv = place.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    shape = (num_pages, num_kv_heads, page, head_dim)
    k_pages, v_pages = place.nans(*shape, dtype=dtype), place.nans(*shape, dtype=dtype)
    norms = [place.randn(head_dim, dtype=dtype) if has_norms else None for _ in range(2)]
    q = rope_and_write(
        qkv, num_heads, cos, sin, positions, kv_loc, k_pages, v_pages, norms[0], norms[1], EPS
    )
    wanted = list(qkv.double().split([num_heads, num_kv_heads, num_kv_heads], dim=1))
    for i, weight in enumerate(norms):
        if weight is not None:
            wanted[i] = reference.rms_norm(wanted[i], weight.double(), EPS)
        wanted[i] = reference.apply_rope(wanted[i], cos.double(), sin.double(), positions)
    errors = [expect_near(q, wanted[0], GATES[dtype])]
    written = kv_loc >= 0
    at = kv_loc[written]
    for pages, rows in ((k_pages, wanted[1]), (v_pages, wanted[2])):
        places = pages.transpose(1, 2).reshape(-1, num_kv_heads, head_dim)
        errors.append(expect_near(places[at], rows[written], GATES[dtype]))
        places[at] = torch.nan
        expect_untouched(places, "places of no row")
    again = [torch.full_like(k_pages, torch.nan) for _ in range(2)]
    last = slice(num_rows - 1, num_rows)
    alone = rope_and_write(
        qkv[last], num_heads, cos, sin, positions[last], kv_loc[last], *again, *norms, EPS
    )
    expect_same(alone, q[last], "a row alone")
    return {"error": max(errors), "gate": GATES[dtype]}


def page_copies(place: Place) -> Finding:
    """Gather, scatter, fork and clear, to the bit and nowhere else; NaN travels as it is."""
    num_pages, page = place.pick(200, 6), place.pick(64, 16)
    shape = (place.pick(4, 1), 2, num_pages, place.pick(8, 1), page, place.pick(128, 8))
    pool = place.randn(*shape, dtype=torch.bfloat16)
    pool[:, :, 1] = torch.nan
    count = place.pick(40, 2)
    order = torch.randperm(num_pages)
    some, others = order[:count].to(place.device), order[count : 2 * count].to(place.device)
    before = pool.clone()
    out = place.nans(count, shape[0], 2, *shape[3:], dtype=torch.bfloat16)
    gather_pages(pool, some.int(), out)
    expect_same(out, before[:, :, some].movedim(2, 0), "gathered")
    scatter_pages(out, pool, others.int())
    wanted = before.clone()
    wanted[:, :, others] = before[:, :, some]
    expect_same(pool, wanted, "scattered")
    shared = torch.randint(0, page + 1, (count,), device=place.device)
    shared[0], shared[1] = 0, page
    fork_pages(pool, some.int(), others.int(), shared.int())
    kept = torch.arange(page, device=place.device)[None, :] < shared[:, None]
    copied = wanted[:, :, some]
    wanted[:, :, others] = torch.where(
        kept[None, None, :, None, :, None], copied, torch.zeros_like(copied)
    )
    expect_same(pool, wanted, "forked")
    clear_pages(pool, some.int())
    wanted[:, :, some] = 0
    expect_same(pool, wanted, "cleared")
    return {"note": f"{count} pages of {num_pages}"}


def host_pages(place: Place) -> Finding:
    """Pages that go to host memory and come back to others are the same to the bit."""
    count, kernels = place.pick(20, 3), GpuKernels(deterministic=False)
    shape = (place.pick(4, 1), 2, 2 * count, place.pick(8, 1), 16, place.pick(128, 8))
    pool = place.randn(*shape, dtype=torch.bfloat16)
    before = pool.clone()
    host = torch.empty(
        (count + 1, *shape[:2], *shape[3:]), dtype=torch.bfloat16, pin_memory=not place.is_dry
    )
    order = torch.randperm(2 * count).tolist()
    sources, targets = order[:count], order[count:]
    places = torch.randperm(count + 1).tolist()[:count]
    kernels.save_pages(pool, sources, host, places)
    pool[:, :, sources] = torch.nan
    kernels.restore_pages(host, places, pool, targets)
    expect_same(pool[:, :, targets], before[:, :, sources], "back from the host")
    expect_untouched(pool[:, :, sources], "pages that were saved")
    return {"note": f"{count} pages"}
