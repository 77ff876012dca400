"""What must hold of every family: a test of a family is a class of this with its own model.

Logits with and without adapters against transformers and PEFT, and the whole engine in one process:
what an answer consists of depends on nothing that happens around it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import PreTrainedModel

from cluster.request import BASE, Request
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.stats import SchedulerCounters
from deploy.local_engine import LocalEngine
from tests.worker.classifiers import rounded
from tests.worker.group import random_tokens
from tests.worker.logit_ranks import LogitRanks
from tests.worker.peft_adapters import TOLERANCE, by_peft, error, make_adapter_dir, read
from worker.model_config_reader import read_model_config
from worker.pools import KVCacheDtype
from worker.protocol import RankConfig, SamplingParams

PAGE = 16
MAX_LENGTH = 256  # positions
NUM_TOKENS = 40  # of an answer, so that it grows over several pages
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(seed=5)  # a tiny model's best tokens soon repeat themselves


@dataclass(frozen=True)
class Made:
    """A tiny model in transformers, in float32, where it was saved, and an adapter of it."""

    reference: PreTrainedModel
    path: Path
    adapter: Path


def check_surroundings(alone: "Engine", start_small: Callable[..., "Engine"]) -> None:
    """Make sure that nothing around an answer changes its tokens.

    Company, chunks, cached prefixes, pages in host memory and preemption, for which `start_small`
    starts the same engine with few pages and small steps.
    """
    shared = random_tokens(70, 1)
    asks = [
        (adapter, (*shared, *random_tokens(5 + 9 * number, number)))
        for number in range(4)
        for adapter in (BASE, alone.adapter)
    ]
    expected = []
    for ask in asks:  # one at a time, nothing cached
        expected += alone.answers([ask], DRAWN)
        alone.forget()
    assert len(set(expected)) == len(asks)
    assert alone.answers(asks, DRAWN) == expected  # in company, whose prefixes are shared
    assert alone.counters.cached_prompt_tokens > 0
    assert alone.answers(asks, DRAWN) == expected  # what was cached, once more

    small = start_small(
        num_pages=16,
        num_host_pages=40,
        num_window_pages=16,
        num_host_window_pages=30,
        num_state_pages=8,
        num_host_state_pages=20,
        token_budget=24,
    )
    assert small.answers(asks, DRAWN) == expected
    assert small.counters.preemptions > 0 or small.slides  # then it never needs more pages
    assert small.answers(asks[::-1], DRAWN) == expected[::-1]
    assert small.counters.restored_pages + small.counters.restored_checkpoint_pages > 0


class FamilyBattery:
    """The tests; `build` is the family's own."""

    adapter = "rank 8 on every linear"  # of tests.worker.peft_adapters
    seed = 3  # of the tokens whose logits are compared
    is_quick = True  # else `make test` has its logits alone: another family is as its neighbour

    @staticmethod
    def build() -> PreTrainedModel:
        """Return a tiny model; its weights are drawn anew."""
        raise NotImplementedError

    @staticmethod
    def distribution(key: str) -> tuple[float, float]:
        """Return the mean and the standard deviation that a parameter's numbers are drawn by."""
        return (1.0, 0.2) if "norm" in key else (0.0, 0.15)

    @pytest.mark.filterwarnings("ignore::UserWarning")
    @pytest.mark.parametrize("tp", [1, 2, 3])
    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    def test_logits_are_those_of_transformers_and_peft(
        self, tiny: Made, dtype: torch.dtype, tp: int
    ) -> None:
        """Both compute in float32 on weights of `dtype`."""
        group = LogitRanks(tiny.path, tp, dtype)
        try:
            group.load(0, read(tiny.adapter, group.config))
            tokens = random_tokens(40, self.seed)
            plain, adapted = group.logits([(None, tokens), (0, tokens)])
        finally:
            group.close()
        reference = rounded(tiny.reference, dtype)
        by_adapter = by_peft(reference, tiny.adapter, tokens)
        assert error(adapted, by_adapter) < TOLERANCE[dtype]
        with torch.inference_mode():
            by_base = reference(torch.tensor([tokens])).logits[0]
        assert error(plain, by_base) < TOLERANCE[dtype]
        assert error(plain, by_adapter) > 5 * TOLERANCE[dtype]  # the adapter does something

    @pytest.mark.parametrize("tp", [1, 2, 3])
    def test_greedy_tokens_are_those_of_transformers(
        self, tiny: Made, start_engine: Callable[..., "Engine"], tp: int
    ) -> None:
        prompts = [random_tokens(length, length) for length in (1, 33, 75)]
        answers = start_engine(tp).answers([(BASE, prompt) for prompt in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            with torch.inference_mode():
                logits = tiny.reference(torch.tensor([[*prompt, *answer]])).logits[0]
            assert answer == tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist())

    @pytest.mark.parametrize("tp", [1, 3])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_what_happens_around_an_answer_changes_none_of_its_tokens(
        self, start_engine: Callable[..., "Engine"], dtype: str, tp: int
    ) -> None:
        how = {"is_bfloat16": dtype == "bfloat16"}
        check_surroundings(start_engine(tp, **how), partial(start_engine, tp, **how))

    @pytest.mark.parametrize("tp", [1, 2])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_an_answer_that_was_lost_goes_on_behind_any_token(
        self, start_engine: Callable[..., "Engine"], dtype: str, tp: int
    ) -> None:
        """On new ranks, which is what a recovery is: what was sent is computed as a prompt is."""
        engine = start_engine(tp, is_bfloat16=dtype == "bfloat16")
        for adapter in (BASE, engine.adapter):
            prompt = random_tokens(43, 2)
            (whole,) = engine.answers([(adapter, prompt)], DRAWN)
            for num_sent in (1, 5, 21, NUM_TOKENS - 1):
                engine.forget()
                (rest,) = engine.answers([(adapter, prompt)], DRAWN, sent=whole[:num_sent])
                assert rest == whole[num_sent:]


class WindowBattery(FamilyBattery):
    """The same of a family some of whose layers have a window that `build` makes a short one."""

    @pytest.mark.parametrize("tp", [1, 2])
    def test_a_long_answer_holds_the_pages_of_its_window_and_no_others(
        self, tiny: Made, start_engine: Callable[..., "Engine"], tp: int
    ) -> None:
        prompt = random_tokens(30, 2)
        answer, held = start_engine(tp).long_answer(prompt, MAX_LENGTH - len(prompt))
        window = read_model_config(tiny.path).sliding_window
        assert window is not None and max(held) <= -(-(window - 1) // PAGE) + 2
        assert held[-2] == held[len(held) // 2]  # it does not grow
        with torch.inference_mode():
            logits = tiny.reference(torch.tensor([[*prompt, *answer]])).logits[0]
        assert answer == tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist())


class HybridBattery(FamilyBattery):
    """The same of a family some of whose layers have states."""

    @pytest.mark.filterwarnings("ignore::UserWarning")
    @pytest.mark.parametrize("tp", [1, 2])
    def test_logits_of_dora_are_those_of_peft(self, tiny: Made, tp: int, tmp_path: Path) -> None:
        make_adapter_dir(tiny.reference, "dora on all linears", tmp_path)
        group = LogitRanks(tiny.path, tp, torch.float32)
        try:
            group.load(0, read(tmp_path, group.config))
            tokens = random_tokens(40, self.seed)
            (adapted,) = group.logits([(0, tokens)])
        finally:
            group.close()
        right = by_peft(tiny.reference, tmp_path, tokens)
        assert error(adapted, right) < TOLERANCE[torch.float32]

    @pytest.mark.parametrize("tp", [1, 2])
    def test_a_prefix_is_resumed_on_the_states_behind_it(
        self, start_engine: Callable[..., "Engine"], tp: int
    ) -> None:
        """Where prompts part, behind a prompt's last full page, and from host memory."""
        engine = start_engine(tp, num_state_pages=6, num_host_state_pages=20)
        shared = random_tokens(70, 1)
        asks = [
            (adapter, (*shared, *random_tokens(40, number)))
            for number in range(4)
            for adapter in (BASE, engine.adapter)
        ]
        cold = []
        for ask in asks:
            cold += engine.answers([ask], DRAWN)
            engine.forget()
        before = engine.counters.cached_prompt_tokens
        assert [engine.answers([ask], DRAWN)[0] for ask in asks] == cold
        # Of each namespace the second prompt finds where it parts, and the others start there.
        assert engine.counters.cached_prompt_tokens - before == 2 * 2 * (70 // PAGE * PAGE)
        before = engine.counters.cached_prompt_tokens
        assert [engine.answers([ask], DRAWN)[0] for ask in asks] == cold
        cached = engine.counters.cached_prompt_tokens - before
        assert cached == len(asks) * (109 // PAGE * PAGE)
        assert engine.counters.restored_checkpoint_pages > 0

    @pytest.mark.filterwarnings("ignore::UserWarning")
    @pytest.mark.parametrize("tp", [1, 2])
    def test_an_adapter_comes_back_to_its_states_until_it_is_unloaded(
        self, tiny: Made, start_engine: Callable[..., "Engine"], tp: int, tmp_path: Path
    ) -> None:
        """In between another one has had the only slot; the base model's are never its own."""
        engine = start_engine(tp, num_slots=1)
        make_adapter_dir(tiny.reference, "dora on all linears", tmp_path)
        other, prompt = engine.add(tmp_path), random_tokens(70, 1)
        before, found = 0, []
        for adapter in (engine.adapter, other, BASE, engine.adapter, other, None, engine.adapter):
            if adapter is None:
                engine.unload(engine.adapter)
                continue
            answers = engine.answers([(adapter, prompt)], DRAWN)
            cached = engine.counters.cached_prompt_tokens
            found.append((adapter, answers[0], cached - before))
            before = cached
        tokens = {adapter: answer for adapter, answer, _ in found}
        assert len(set(tokens.values())) == 3
        assert [answer for _, answer, _ in found] == [tokens[adapter] for adapter, _, _ in found]
        full = 70 // PAGE * PAGE
        assert [cached for _, _, cached in found] == [0, 0, 0, full, full, 0]

    def test_choices_of_one_prompt_are_what_each_is_alone(
        self, start_engine: Callable[..., "Engine"]
    ) -> None:
        engine = start_engine(1)
        prompt = random_tokens(43, 1)
        seeds = [SamplingParams(seed=seed) for seed in (1, 2, 3)]
        alone = []
        for sampling in seeds:
            alone += engine.answers([(BASE, prompt)], sampling)
            engine.forget()
        assert len(set(alone)) == 3
        assert engine.choices(prompt, seeds) == alone


class Engine:
    """The whole engine in one process, with the adapter."""

    def __init__(
        self,
        tiny: Made,
        tp: int,
        *,
        is_bfloat16: int = 0,
        quantization: Literal["int8", "int4"] | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        num_pages: int = 0,
        num_host_pages: int = 0,
        num_window_pages: int = 0,
        num_host_window_pages: int = 0,
        num_state_pages: int = 0,
        num_host_state_pages: int = 0,
        token_budget: int = 64,
        num_slots: int = 2,
    ) -> None:
        rank = RankConfig(
            model_dir=str(tiny.path),
            rank=0,
            tp=tp,
            dtype="bfloat16" if is_bfloat16 else "float32",
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            page_size=PAGE,
            kv_memory_bytes=2**22,
            kv_host_memory_bytes=2**22,
            num_slots=num_slots,
            max_model_len=MAX_LENGTH,
            num_threads=None,
        )
        model = read_model_config(tiny.path)
        self.slides = len(model.sliding_layers) == model.num_layers
        if self.slides:
            num_pages = 0  # they are of no layers: as many as there may be
        scheduler = SchedulerConfig(
            num_pages=num_pages,
            num_host_pages=num_host_pages,
            num_window_pages=num_window_pages,
            num_host_window_pages=num_host_window_pages,
            num_state_pages=num_state_pages if model.mixer_layers else 0,
            num_host_state_pages=num_host_state_pages,
            page_size=PAGE,
            num_slots=num_slots,
            max_running=8,
            max_waiting=16,
            token_budget=token_budget,
            max_model_len=MAX_LENGTH,
            base_digest="b",
        )
        self._engine = LocalEngine(rank, scheduler)
        self.adapter = self._engine.add_adapter(tiny.adapter)
        self._count = 0

    def answers(
        self,
        asks: Sequence[tuple[str, tuple[int, ...]]],
        sampling: SamplingParams = GREEDY,
        sent: tuple[int, ...] = (),
    ) -> list[tuple[int, ...]]:
        """Return the tokens of answers to prompts with their adapters, asked all at once.

        With what was `sent` before, those that come behind.
        """
        requests = []
        for adapter, prompt in asks:
            self._count += 1
            requests.append(
                Request(
                    str(self._count),
                    adapter,
                    prompt,
                    sampling,
                    max_tokens=NUM_TOKENS,
                    output_token_ids=sent,
                )
            )
        found = self._engine.generate(requests)
        assert not any(answer.error for answer in found)
        return [tuple(answer.token_ids) for answer in found]

    def choices(
        self, prompt: tuple[int, ...], samplings: Sequence[SamplingParams]
    ) -> list[tuple[int, ...]]:
        """Return the answers to one prompt that are asked for together, as `n` does."""
        found = self._engine.submit_choices(
            [
                Request(f"choice {at}", BASE, prompt, one, max_tokens=NUM_TOKENS)
                for at, one in enumerate(samplings)
            ]
        )
        self._engine.run()
        return [tuple(answer.token_ids) for answer in found]

    def long_answer(
        self, prompt: tuple[int, ...], num_tokens: int
    ) -> tuple[tuple[int, ...], list[int]]:
        """Return a greedy answer, and how many window pages were held after each step."""
        answer = self._engine.submit(Request("long", BASE, prompt, GREEDY, max_tokens=num_tokens))
        held = []
        while self._engine.step():
            held.append(self._engine.scheduler.stats().held_window_pages)
        return tuple(answer.token_ids), held

    def add(self, directory: Path) -> str:
        """Take an adapter in."""
        return self._engine.add_adapter(directory)

    def unload(self, adapter: str) -> None:
        """Forget all that there is of an adapter, which may be used again."""
        self._engine.scheduler.unload(adapter)
        self._engine.run()
        assert [one.digest for one in self._engine.scheduler.take_unloaded()] == [adapter]

    def forget(self) -> None:
        """Drop all that is cached."""
        self._engine.scheduler.reset_prefix_cache()

    @property
    def counters(self) -> SchedulerCounters:
        """What has happened so far."""
        return self._engine.scheduler.stats().counters

    def close(self) -> None:
        """End its threads."""
        self._engine.close()
