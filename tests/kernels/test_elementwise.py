"""kernels.elementwise: right in float64's eyes, Hugging Face's rounding, any company."""

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from kernels import reference
from kernels.elementwise import (
    add_rms_norm,
    apply_rope,
    gate_heads,
    gelu_tanh_and_mul,
    rms_norm,
    silu_and_mul,
    square_sums,
    swigluoai_and_mul,
    wide_norm,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
DTYPES = list(TOLERANCE)
ROW_COUNTS = [1, 2, 3, 4, 5, 7, 8, 17, 33, 64, 65, 129, 300]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rope_tables(max_position: int, head_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(max_position), frequencies)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 33, 64, 576, 4096])
def test_norms_agree_with_float64(hidden: int, dtype: torch.dtype) -> None:
    x, residual = normal(5, hidden, dtype=dtype), normal(7, hidden, dtype=dtype)[:5]
    weight = normal(hidden, dtype=dtype)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert error(rms_norm(x, weight, 1e-5), expected) < TOLERANCE[dtype]
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


def test_a_norm_rounds_once_and_keeps_a_float32_residual() -> None:
    x, weight = normal(3, 64, dtype=torch.bfloat16), normal(64, dtype=torch.bfloat16)
    residual = normal(3, 64, dtype=torch.float32)
    total32 = residual + x.float()
    scaled = total32 * torch.rsqrt(total32.pow(2).mean(-1, keepdim=True) + 1e-6)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, total32)
    assert torch.equal(normed, (scaled * weight.float()).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [1, 31, 32, 307, 1536])
def test_the_gated_activation_agrees_with_float64(intermediate: int, dtype: torch.dtype) -> None:
    gate_up = normal(5, 2 * intermediate, dtype=dtype)
    before = gate_up.clone()
    expected = reference.silu_and_mul(gate_up.double())
    assert error(silu_and_mul(gate_up), expected) < TOLERANCE[dtype]
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [1, 31, 32, 307, 1536])
def test_the_gate_of_gelu_agrees_with_float64_and_torch(
    intermediate: int, dtype: torch.dtype
) -> None:
    gate_up = normal(5, 2 * intermediate, dtype=dtype)
    before = gate_up.clone()
    found = gelu_tanh_and_mul(gate_up)
    assert found.dtype == dtype
    assert error(found, reference.gelu_tanh_and_mul(gate_up.double())) < TOLERANCE[dtype]
    gate, up = gate_up.double().chunk(2, dim=-1)
    theirs = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert error(reference.gelu_tanh_and_mul(gate_up.double()), theirs) < 1e-12
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 10), (4, 256)])
def test_the_gate_behind_attention_agrees_with_float64(
    heads: int, dim: int, dtype: torch.dtype
) -> None:
    x, rows = normal(5, heads, dim, dtype=dtype), normal(5, 2 * heads * dim, dtype=dtype)
    gates, before = 5 * rows[:, : heads * dim], x.clone()
    gate_heads(x, gates)
    assert error(x, reference.gate_heads(before.double(), gates.double())) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [1, 31, 32, 307, 1536])
def test_the_clamped_gate_agrees_with_float64_and_transformers(
    intermediate: int, dtype: torch.dtype
) -> None:
    gate_up = 5 * normal(5, 2 * intermediate, dtype=dtype)
    before = gate_up.clone()
    found = swigluoai_and_mul(gate_up, 1.702, 7.0)
    right = reference.swigluoai_and_mul(gate_up.double(), 1.702, 7.0)
    assert found.dtype == dtype
    assert error(found, right) < TOLERANCE[dtype]
    assert torch.equal(gate_up, before)
    interleaved = gate_up.double().view(5, 2, intermediate).transpose(1, 2).flatten(1)
    config = GptOssConfig(num_local_experts=1, hidden_size=1, intermediate_size=1)
    assert error(right, GptOssExperts(config)._apply_gate(interleaved)) < 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_norm_the_sum_is_rounded(dtype: torch.dtype) -> None:
    x, residual = normal(3, 64, dtype=torch.float32), normal(5, 64, dtype=torch.float32)[:3]
    out, total = add_rms_norm(x, residual, None, 1e-5, dtype)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, total.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 96)])
def test_wide_norms_go_over_all_heads_of_all_ranks(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """The heads of Q stand for those of two ranks; both have the heads of K."""
    qkv = normal(70, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q_norm, k_norm = (
        normal(num_heads * head_dim, dtype=dtype),
        normal(num_kv_heads * head_dim, dtype=dtype),
    )
    q, k, v = qkv.double().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected = torch.cat(
        [
            reference.rms_norm(q.flatten(1), q_norm.double(), 1e-5),
            reference.rms_norm(k.flatten(1), k_norm.double(), 1e-5),
            v.flatten(1),
        ],
        dim=1,
    )
    cut = num_heads // 2
    parts = [
        torch.cat((some, qkv[:, num_heads:]), dim=1)
        for some in qkv[:, :num_heads].split([cut, num_heads - cut], dim=1)
    ]
    heads = [cut, num_heads - cut]
    sums = sum(
        square_sums(part, n, num_kv_heads, counts_kv=rank == 0)
        for rank, (part, n) in enumerate(zip(parts, heads, strict=True))
    )
    widths = num_heads * head_dim, num_kv_heads * head_dim
    norms = q_norm.split([n * head_dim for n in heads])
    for part, norm in zip(parts, norms, strict=True):
        alone, row = part[9:10].clone(), sums[9:10]
        wide_norm(part, sums, norm, k_norm, widths, 1e-5)
        wide_norm(alone, row, norm, k_norm, widths, 1e-5)
        assert torch.equal(alone, part[9:10])
    found = torch.cat([parts[0][:, :cut], parts[1]], dim=1).flatten(1)
    assert error(found, expected) < TOLERANCE[dtype]
    assert torch.equal(
        square_sums(qkv[9:10], num_heads, num_kv_heads, counts_kv=True),
        square_sums(qkv, num_heads, num_kv_heads, counts_kv=True)[9:10],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_a_head_may_rotate_alone(dtype: torch.dtype) -> None:
    q, k = normal(6, 3, 128, dtype=dtype), normal(6, 1, 128, dtype=dtype)
    cos, sin = rope_tables(50, 96)
    positions = torch.arange(6) * 8
    for found, x in zip(apply_rope(q, k, cos, sin, positions), (q, k), strict=True):
        expected = reference.apply_rope(x.double(), cos.double(), sin.double(), positions)
        assert error(found, expected) < TOLERANCE[dtype]
        assert torch.equal(found[..., 96:], x[..., 96:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (1, 1, 128)])
def test_rope_agrees_with_float64_and_does_not_change_its_input(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    q = normal(6, num_heads, head_dim, dtype=dtype)
    k = normal(6, num_kv_heads, head_dim, dtype=dtype)
    cos, sin = rope_tables(100, head_dim)
    positions = torch.tensor([0, 1, 99, 5, 5, 42])
    before = q.clone(), k.clone()
    rotated = apply_rope(q, k, cos, sin, positions)
    for actual, x, copy in zip(rotated, (q, k), before, strict=True):
        expected = reference.apply_rope(x.double(), cos.double(), sin.double(), positions)
        assert actual.dtype == dtype
        assert error(actual, expected) < TOLERANCE[dtype]
        assert torch.equal(x, copy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_is_bit_for_bit_what_hugging_face_computes(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = normal(6, 9, 64, dtype=dtype), normal(6, 3, 64, dtype=dtype)
    cos, sin = rope_tables(50, 64)
    positions = torch.tensor([0, 1, 49, 5, 5, 42])
    cos_full, sin_full = (torch.cat((t, t), dim=-1)[positions].to(dtype)[None] for t in (cos, sin))
    expected = apply_rotary_pos_emb(q.transpose(0, 1), k.transpose(0, 1), cos_full, sin_full)
    for actual, theirs in zip(apply_rope(q, k, cos, sin, positions), expected, strict=True):
        assert torch.equal(actual, theirs[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_rows_have_the_same_bits_in_any_batch(num_rows: int, dtype: torch.dtype) -> None:
    cos, sin = rope_tables(300, 64)
    positions = torch.arange(300)
    q, k = normal(300, 9, 64, dtype=dtype), normal(300, 3, 64, dtype=dtype)
    whole_q, whole_k = apply_rope(q, k, cos, sin, positions)
    for first in (0, 300 - num_rows):
        part = slice(first, first + num_rows)
        for hidden in (33, 576):
            x, weight = normal(300, hidden, dtype=dtype), normal(hidden, dtype=dtype)
            whole = rms_norm(x, weight, 1e-5)
            assert torch.equal(rms_norm(x[part], weight, 1e-5), whole[part])
        for intermediate in (1, 307, 768):
            gate_up = normal(300, 2 * intermediate, dtype=dtype)
            assert torch.equal(silu_and_mul(gate_up[part]), silu_and_mul(gate_up)[part])
            assert torch.equal(gelu_tanh_and_mul(gate_up[part]), gelu_tanh_and_mul(gate_up)[part])
            clamped = swigluoai_and_mul(gate_up, 1.702, 0.9)
            assert torch.equal(swigluoai_and_mul(gate_up[part], 1.702, 0.9), clamped[part])
        gated, gated_part, gates = q.clone(), q[part].clone(), normal(300, 9 * 64, dtype=dtype)
        gate_heads(gated, gates)
        gate_heads(gated_part, gates[part])
        assert torch.equal(gated_part, gated[part])
        part_q, part_k = apply_rope(q[part], k[part], cos, sin, positions[part])
        assert torch.equal(part_q, whole_q[part])
        assert torch.equal(part_k, whole_k[part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_heads_inside_a_fused_projection_equals_the_norm_of_a_copy(
    dtype: torch.dtype,
) -> None:
    qkv, weight = normal(7, 15, 64, dtype=dtype), normal(64, dtype=dtype)
    heads = qkv[:, :9]
    assert torch.equal(rms_norm(heads, weight, 1e-6), rms_norm(heads.clone(), weight, 1e-6))
    assert torch.equal(rms_norm(heads[:1], weight, 1e-6), rms_norm(heads, weight, 1e-6)[:1])


def test_no_rows_give_no_rows() -> None:
    cos, sin = rope_tables(4, 8)
    none = torch.empty(0, dtype=torch.int64)
    q, k = apply_rope(torch.empty(0, 3, 8), torch.empty(0, 1, 8), cos, sin, none)
    assert (q.shape, k.shape) == ((0, 3, 8), (0, 1, 8))
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert silu_and_mul(torch.empty(0, 16)).shape == (0, 8)


@pytest.mark.parametrize("intermediate", [307, 2048])
def test_the_activation_has_the_same_bits_where_torch_would_deal_rows_to_threads(
    intermediate: int,
) -> None:
    gate_up = normal(1000, 2 * intermediate, dtype=torch.float32)
    whole = silu_and_mul(gate_up)
    for num_rows in (1, 50, 65, 130):
        assert torch.equal(silu_and_mul(gate_up[:num_rows]), whole[:num_rows])
