"""`--quantization`: whole models whose linears are quantized as they are loaded."""

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import dispatch, quantized
from kernels.native.library import native_library
from kernels.quantized import (
    HEAD_METHOD,
    QuantizationMethod,
    QuantizedWeight,
    dequantize,
    quantize,
    quantized_linear,
)
from tests.worker.classifiers import class_logits, save_classifier
from tests.worker.engine.test_classify import Asking
from tests.worker.group import random_tokens
from tests.worker.logit_ranks import LogitRanks
from tests.worker.models.families.battery import Engine, Made, check_surroundings
from tests.worker.peft_adapters import by_peft, error, read
from tests.worker.quantization.packing import gptq, quantize_checkpoint
from worker import spans
from worker.distributed.communicator import SingleRank
from worker.engine.rank import Rank
from worker.model_config_reader import read_model_config
from worker.protocol import RankConfig
from worker.spans import Span
from worker.weights.partition import partition

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(native_library() is None, reason="no native library"),
]
# Of logits: what rounding costs tiny models with random weights, more than it costs trained ones.
# Measured in int8: 0.03 to 0.06, 0.08 to 0.14 of LFM2 and experts, where a row may get others, and
# 0.17 of Qwen3.5; in int4, whose weights are off by 7%, 0.25 to 0.39, and 0.7 of LFM2 and Qwen3.5.
CLOSE: dict[QuantizationMethod, float] = {"int8": 0.15, "int4": 0.8}
# Measured: 1e-7, unless float32 is rounded so that a code is its neighbour: 2e-3, 7e-3 in int4.
SAME_CODES: dict[QuantizationMethod, float] = {"int8": 4e-3, "int4": 1e-2}
# A state takes a neighbour's code along to all rows behind it: 1.3e-2 with these tokens.
SAME_CODES_OF = {"granitemoehybrid": 2e-2}
EXPERTS = ["qwen3_moe", "gpt_oss"]
EXACT = ["llama", "llama3_biased", "gemma3", *EXPERTS, "gpt_oss_wide", "lfm2", "qwen3_5"]
EXACT += ["qwen3_5_moe", "olmo2", "granitemoehybrid"]
# Of them in float32 and bfloat16, each on any number of ranks.
EXACT_ADAPTERS = {
    "llama": ("rank 8 on every linear", "dora", "lora on both ends"),
    "llama3_biased": ("dora on both ends", "saved both"),
    "gemma3": ("rank 8 on every linear",),
    "qwen3_moe": ("attention, experts and router",),
    "gpt_oss_wide": ("attention, stacked experts and router",),
    "lfm2": ("rank 8 on all linears",),
    "qwen3_5_moe": ("all linears, experts and router",),
    "olmo2": ("rank 8 on every linear",),
    "granitemoehybrid": ("rank 8 on all linears",),
}
WHOLE_GROUPS = {"lfm2": (2,), "gpt_oss": (3,)}  # numbers of ranks that divide none
ADAPTERS = {"llama": "dora", "qwen3_moe": "attention, experts and router"}
FAMILIES = ["llama", "llama3_biased", "gemma3", "lfm2", "granitemoehybrid", "qwen3_5"]


@pytest.fixture(params=CLOSE)
def method(request: pytest.FixtureRequest) -> QuantizationMethod:
    name: QuantizationMethod = request.param
    return name


@pytest.fixture
def start() -> Iterator[Callable[..., LogitRanks]]:
    """Return a function that starts ranks; all are stopped at the end."""
    groups: list[LogitRanks] = []

    def start(path: Path, tp: int, dtype: torch.dtype = torch.float32, **how: Any) -> LogitRanks:
        groups.append(LogitRanks(path, tp, dtype, **how))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("name", [*FAMILIES, *EXPERTS])
def test_logits_are_close_to_those_of_weights_that_are_not_quantized(
    tiny_model: Any,
    start: Callable[..., LogitRanks],
    name: str,
    tp: int,
    method: QuantizationMethod,
) -> None:
    tokens, path = random_tokens(40, 3), tiny_model(name).path
    (plain,) = start(path, tp).logits([(None, tokens)])
    (found,) = start(path, tp, method=method).logits([(None, tokens)])
    assert (
        1e-2
        < error(found, plain)
        < (0.2 if (name, method) == ("qwen3_5", "int8") else CLOSE[method])
    )


class _QuantizedLinear(torch.nn.Linear):
    """What is computed, by transformers' own models."""

    quantized: QuantizedWeight

    def forward(self, x: Tensor) -> Tensor:
        y = quantized_linear(x.flatten(0, -2), self.quantized, self.bias)
        return y.unflatten(0, x.shape[:-1])


def computed_in(
    method: QuantizationMethod, reference: torch.nn.Module, path: Path
) -> torch.nn.Module:
    """Return a copy whose linears multiply as ours do, and whose weights are what is multiplied."""
    model, part = copy.deepcopy(reference), partition(read_model_config(path), 1, 0)
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "score":
            is_head = name == "lm_head"
            ours = max((one for one in part.by_name if name.endswith(one)), key=len, default="")
            in_groups = is_head or part.has_whole_groups(ours)
            of_this = HEAD_METHOD if is_head else method
            module.__class__ = _QuantizedLinear
            module.quantized = quantize(module.weight.detach(), of_this, is_rotated=in_groups)
            # Of a tied one a copy: the embedding is not quantized.
            module.weight = torch.nn.Parameter(dequantize(module.quantized))
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_in_fewer_bits(
    tiny_model: Any,
    start: Callable[..., LogitRanks],
    name: str,
    method: QuantizationMethod,
) -> None:
    tokens = random_tokens(40, 3)
    (found,) = start(tiny_model(name).path, 1, method=method).logits([(None, tokens)])
    with torch.inference_mode():
        theirs = computed_in(method, tiny_model(name).reference, tiny_model(name).path)
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert error(found, expected) < SAME_CODES_OF.get(name, SAME_CODES[method])


@pytest.mark.parametrize("kind", ["rank 8 on every linear", "lora on both ends", "dora"])
@pytest.mark.parametrize("name", ["llama", "llama3_biased"])
def test_logits_of_adapters_are_those_of_peft_in_fewer_bits(
    tiny_model: Any,
    made: Any,
    start: Callable[..., LogitRanks],
    name: str,
    kind: str,
    method: QuantizationMethod,
) -> None:
    reference, path = tiny_model(name).reference, tiny_model(name).path
    tokens, folder = random_tokens(21, 3), made(name, kind)
    group = start(path, 1, method=method)
    group.load(0, read(folder, group.config))
    (found,) = group.logits([(0, tokens)])
    assert (
        error(found, by_peft(computed_in(method, reference, path), folder, tokens))
        < SAME_CODES[method]
    )
    assert error(found, by_peft(reference, folder, tokens)) > 3 * SAME_CODES[method]


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize(("name", "module"), [("llama", "down_proj"), ("qwen3_5", "out_proj")])
def test_dora_sees_the_weights_that_are_multiplied(
    tiny_model: Any,
    start: Callable[..., LogitRanks],
    name: str,
    module: str,
    tp: int,
    method: QuantizationMethod,
) -> None:
    group = start(tiny_model(name).path, tp, method=method)
    for rank in group.ranks:
        layer = rank.model._weights.layers[0]
        weight = layer.down if module == "down_proj" else layer.mixer.out_proj
        columns = rank.part.slices(module)[1]
        ones = torch.eye(len(columns))
        multiplied = rank.kernels.linear(ones, weight).T
        assert rank.bank._base is not None
        with rank.bank._base.opened() as opened:
            seen = opened.rows(0, module, Span(3, 9))
            head = opened.head_rows(rank.part.vocab)
        torch.testing.assert_close(
            seen[:, columns.start : columns.stop], multiplied[3:9], rtol=1e-6, atol=1e-7
        )
        by_head = rank.kernels.linear(torch.eye(head.shape[1]), rank.model._lm_head).T
        torch.testing.assert_close(head, by_head, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_row_of_a_mixed_batch_is_what_it_is_alone(
    tiny_model: Any,
    made: Any,
    start: Callable[..., LogitRanks],
    dtype: torch.dtype,
    tp: int,
    method: QuantizationMethod,
) -> None:
    group = start(tiny_model("llama").path, tp, dtype, method=method)
    for slot, kind in enumerate(("lora on both ends", "dora on both ends", "saved head")):
        group.load(slot, read(made("llama", kind), group.config))
    prompts = [
        (slot, random_tokens(length, length + 7 * turn))
        for turn, length in enumerate((1, 19, 37))
        for slot in (2, None, 0, 1)
    ]
    alone = [group.logits([prompt])[0] for prompt in prompts]
    for found, expected in zip(group.logits(prompts), alone, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_with_exact_sums_logits_have_the_same_bits_on_any_number_of_ranks(
    tiny_model: Any,
    made: Any,
    start: Callable[..., LogitRanks],
    name: str,
    dtype: torch.dtype,
) -> None:
    """Of the base model, alone and beside adapters, and of adapters of several kinds."""
    base = [(None, random_tokens(length, length)) for length in (1, 17, 40)]
    kinds = EXACT_ADAPTERS.get(name, ())
    adapted = [(slot, random_tokens(9 + slot, slot)) for slot in range(len(kinds))]

    def logits(tp: int) -> list[Tensor]:
        group = start(tiny_model(name).path, tp, dtype, method="int8", has_exact_sums=True)
        alone = group.logits(base)
        for slot, kind in enumerate(kinds):
            group.load(slot, read(made(name, kind), group.config))
        return [*alone, *group.logits([*adapted, *base])]

    expected = logits(1)
    for found, right in zip(expected[-len(base) :], expected[: len(base)], strict=True):
        assert torch.equal(found, right)
    for tp in WHOLE_GROUPS.get(name, (2, 3)):
        for found, right in zip(logits(tp), expected, strict=True):
            assert torch.equal(found, right)


def test_ranks_divide_inputs_between_the_groups_that_kernels_quantize_together() -> None:
    assert spans.GROUP == quantized.GROUP


def test_with_exact_sums_dora_sees_the_weights_that_are_multiplied(
    tiny_model: Any, start: Callable[..., LogitRanks]
) -> None:
    group = start(tiny_model("llama").path, 3, method="int8", has_exact_sums=True)
    alone = start(tiny_model("llama").path, 1, method="int8")
    seen = []
    for one in (*group.ranks, *alone.ranks):
        assert one.bank._base is not None
        with one.bank._base.opened() as opened:
            seen.append(opened.rows(0, "down_proj", Span(0, 72)))
    assert all(torch.equal(rows, seen[-1]) for rows in seen)


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 2),
        pytest.param("qwen3_moe", 1, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_bfloat16", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_happens_around_an_answer_changes_none_of_its_tokens(
    tiny_model: Any, made: Any, name: str, tp: int, method: QuantizationMethod, *, is_bfloat16: bool
) -> None:
    kind = {"llama": "rank 8 on every linear", "qwen3_moe": "attention, experts and router"}
    tiny = tiny_model(name)
    model = Made(tiny.reference, tiny.path, made(name, kind.get(name, "little on all linears")))
    start = partial(Engine, model, tp, is_bfloat16=is_bfloat16, quantization=method)
    with ExitStack() as stack:
        engine = stack.enter_context(closing(start()))
        check_surroundings(engine, lambda **small: stack.enter_context(closing(start(**small))))


@pytest.fixture
def coded_and_meant(tiny_model: Any, tmp_path: Path) -> tuple[Path, Path]:
    """Return a checkpoint of GPTQ's codes, and one of what they mean.

    64 inputs share a scale, of which 32 hardly ever have both ends of its range.
    """
    coded, meant_path = tmp_path / "coded", tmp_path / "meant"
    shutil.copytree(tiny_model("llama3_biased").path, coded)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    meant = quantize_checkpoint(coded, settings, gptq(4, 64, offset=1))
    reference = copy.deepcopy(tiny_model("llama3_biased").reference)
    reference.load_state_dict(meant, strict=False)
    reference.save_pretrained(meant_path)
    return coded, meant_path


def test_a_checkpoint_that_is_quantized_is_widened_and_quantized_from_what_it_means(
    coded_and_meant: tuple[Path, Path], start: Callable[..., LogitRanks]
) -> None:
    tokens = random_tokens(30, 4)
    found, expected = (
        start(path, 2, torch.bfloat16, method="int8").logits([(None, tokens)])[0]
        for path in coded_and_meant
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_codes_of_4_bits_are_found_again_in_int4(
    coded_and_meant: tuple[Path, Path], start: Callable[..., LogitRanks], tp: int
) -> None:
    coded, meant = coded_and_meant
    prompt = [(None, random_tokens(40, 3))]
    (right,), (anew,) = (
        start(meant, tp, method=method).logits(prompt) for method in (None, "int4")
    )
    (found,) = start(coded, tp, method="int4").logits(prompt)
    assert error(found, right) < error(anew, right) / 2  # that of rows and the lm_head is left


def test_a_model_that_classifies_does_so_in_fewer_bits(
    tiny_model: Any, start_group: Any, tmp_path: Path, method: QuantizationMethod
) -> None:
    classifier = save_classifier(tiny_model("llama").reference, tmp_path, 5)
    prompts = [(None, random_tokens(length, length)) for length in (3, 20, 33)]
    asking = Asking(start_group(tmp_path, quantization=method))
    found = asking.together(prompts)
    for one, alone, (_, tokens) in zip(found, asking.alone(prompts), prompts, strict=True):
        assert one.tolist() == alone.tolist()
        expected = class_logits(computed_in(method, classifier, tmp_path), tokens)
        assert error(torch.from_numpy(one.copy()), expected) < SAME_CODES[method]


def test_a_rank_says_how_it_computes_and_that_no_row_sees_its_batch(
    tiny_model: Any,
    start_group: Any,
    method: QuantizationMethod,
) -> None:
    for name in ("llama", "qwen3_moe"):
        plain = start_group(tiny_model(name).path, dtype="bfloat16").infos[0]
        (info,) = start_group(tiny_model(name).path, dtype="bfloat16", quantization=method).infos
        assert info.products == f"{plain.products}, {method}"
        assert info.batch_variant_linears == ()
        assert info.weight_bytes < plain.weight_bytes


def test_without_the_c_library_fewer_bits_are_refused(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "native_library", lambda: None)
    path = tiny_model("llama").path
    config = RankConfig(
        model_dir=str(path),
        rank=0,
        tp=1,
        dtype="float32",
        quantization="int8",
        kv_memory_bytes=2**20,
        num_slots=1,
        max_model_len=64,
        num_threads=1,
    )
    with pytest.raises(ValueError, match="int8 is computed on CPUs by the C library alone"):
        Rank(config, SingleRank()).load()
