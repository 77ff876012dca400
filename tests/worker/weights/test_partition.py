"""Who holds what, for every head layout and every number of ranks that it can feed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.llama_linears import COLUMN_PARALLEL, LINEAR_MODULES
from tests.whole_modules import module_shape
from worker.linears import Linear, separate_linears
from worker.model_config import ModelConfig, RopeConfig
from worker.spans import GROUP, Span, even_spans, group_spans
from worker.weights.partition import check_groups, check_tp, partition


def shape(num_heads: int, num_kv_heads: int, vocab: int = 131, mlp: int = 100) -> ModelConfig:
    return ModelConfig(
        family="llama",
        num_layers=1,
        hidden_size=48,
        intermediate_size=mlp,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        vocab_size=vocab,
        max_position=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4),
        tie_word_embeddings=False,
        linears=separate_linears(),
        qk_norm=False,
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    num_kv_heads = draw(st.integers(1, 8))
    group = draw(st.integers(1, 8))
    config = shape(num_kv_heads * group, num_kv_heads)
    tp = draw(st.integers(1, num_kv_heads * group))
    try:
        check_tp(config, tp)
    except ValueError:
        tp = num_kv_heads
    return config, tp


@given(layouts())
def test_query_heads_are_dealt_out_once_each_beside_the_kv_head_they_read(layout):
    config, tp = layout
    parts = [partition(config, tp, rank) for rank in range(tp)]
    heads = [head for part in parts for head in range(part.q_heads.start, part.q_heads.stop)]
    assert heads == list(range(config.num_heads))
    group = config.num_heads // config.num_kv_heads
    for part in parts:
        assert len(part.q_heads) > 0
        assert len(part.q_heads) % len(part.kv_heads) == 0
        local_group = len(part.q_heads) // len(part.kv_heads)
        for i in range(len(part.q_heads)):
            kv_head = part.kv_heads.start + i // local_group
            assert (part.q_heads.start + i) // group == kv_head


@given(layouts())
def test_slices_of_a_sharded_axis_cover_it_without_gaps(layout):
    config, tp = layout
    parts = [partition(config, tp, rank) for rank in range(tp)]
    for module in LINEAR_MODULES:
        if module in ("k_proj", "v_proj") and tp > config.num_kv_heads:
            continue  # replicated
        axis = 0 if module in COLUMN_PARALLEL else 1
        spans = [(*outputs, inputs)[axis] for outputs, inputs in (p.slices(module) for p in parts)]
        assert spans[0].start == 0
        assert [span.stop for span in spans[:-1]] == [span.start for span in spans[1:]]
        assert spans[-1].stop == module_shape(config, module)[axis]


@given(st.integers(0, 1000), st.integers(1, 64))
def test_even_spans_differ_by_at_most_one(total, parts):
    lengths = [len(span) for span in even_spans(total, parts)]
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(0, 200), st.integers(1, 20))
def test_what_consists_of_groups_is_cut_between_them_where_there_are_enough(groups, parts):
    spans = group_spans(GROUP * groups, parts)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == GROUP * groups
    if GROUP * groups % parts and groups >= parts:
        assert all(span.start % GROUP == 0 for span in spans)
        lengths = [len(span) for span in spans]
        assert max(lengths) - min(lengths) <= GROUP and min(lengths) > 0
    assert group_spans(GROUP * groups + 1, parts) == even_spans(GROUP * groups + 1, parts)


@given(st.integers(0, 6000), st.integers(1, 20))
def test_what_ranks_can_share_equally_they_do(share, parts):
    assert {len(span) for span in group_spans(share * parts, parts)} == {share}


@pytest.mark.parametrize("tp", [0, -1, 10, 12])
def test_a_number_of_ranks_that_leaves_one_without_heads_is_refused(tp):
    with pytest.raises(ValueError, match="tensor-parallel size"):
        check_tp(shape(9, 3), tp)


def test_smollm_runs_on_every_number_of_ranks_up_to_its_query_heads():
    for tp in range(1, 10):
        check_tp(shape(9, 3), tp)


def test_each_part_of_a_fused_module_is_cut_by_itself():
    qkv = Linear("qkv_proj", "self_attn", "qkv", "column", ("q_heads", "kv_heads", "kv_heads"))
    gate_up = Linear("gate_up_proj", "mlp", "gate_up", "column", ("mlp", "mlp"))
    config = replace(shape(6, 3, mlp=100), linears=(qkv, gate_up))
    assert module_shape(config, "qkv_proj") == (12 * 8, 48)
    assert module_shape(config, "gate_up_proj") == (200, 48)
    outputs, inputs = partition(config, 2, 1).slices("qkv_proj")
    assert outputs == (Span(32, 48), Span(64, 72), Span(88, 96))  # of 48 of Q, 24 of K, 24 of V
    assert inputs == Span(0, 48)
    assert partition(config, 2, 1).slices("gate_up_proj")[0] == (Span(50, 100), Span(150, 200))


def test_ranks_that_would_divide_groups_of_inputs_are_refused_where_these_must_be_whole():
    for mlp, tp in ((96, 3), (100, 4), (256, 4), (224, 3)):
        check_groups(shape(4, 4, mlp=mlp), tp)
    said = "size 4 is not possible for --quantization int8 with --deterministic: the 96 inputs of d"
    with pytest.raises(ValueError, match=said):
        check_groups(shape(4, 4, mlp=96), 4)
    with pytest.raises(ValueError, match="3 groups of 32, and ranks would divide some; choose a"):
        check_groups(shape(4, 4, mlp=96), 2)
