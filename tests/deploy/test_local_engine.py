"""The whole engine in one process serves weighted sums of the adapters that it was given."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from cluster.request import BASE, Request, compose
from cluster.scheduler.config import SchedulerConfig
from deploy.local_engine import LocalEngine
from tests.end_to_end.tiny_models import make_tiny_model
from tests.worker.peft_adapters import make_adapter_dir
from worker.protocol import RankConfig, SamplingParams


def make_engine(model_dir: Path, tp: int) -> LocalEngine:
    rank = RankConfig(
        model_dir=str(model_dir),
        rank=0,
        tp=tp,
        dtype="float32",
        page_size=16,
        kv_memory_bytes=2**22,
        num_slots=2,
        max_model_len=128,
        num_threads=None,
    )
    scheduler = SchedulerConfig(
        num_pages=0,
        page_size=16,
        num_slots=2,
        max_running=8,
        max_waiting=8,
        token_budget=64,
        max_model_len=128,
        base_digest="b",
    )
    return LocalEngine(rank, scheduler)


@pytest.mark.parametrize("tp", [1, 2])
def test_half_an_adapter_and_a_quarter_of_its_double_are_the_adapter(
    tmp_path: Path, tp: int
) -> None:
    model_dir, one, double = (tmp_path / name for name in ("model", "one", "double"))
    make_tiny_model("llama", model_dir)
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    make_adapter_dir(base, "rank and alpha patterns under rslora", one)
    shutil.copytree(one, double)
    config = json.loads((one / "adapter_config.json").read_text())
    config["lora_alpha"] *= 2
    config["alpha_pattern"] = {key: 2 * alpha for key, alpha in config["alpha_pattern"].items()}
    (double / "adapter_config.json").write_text(json.dumps(config))
    engine = make_engine(model_dir, tp)
    digests = [engine.add_adapter(folder) for folder in (one, double)]
    asked = [BASE, *digests, compose(zip(digests, (0.5, 0.25), strict=True))]
    greedy = SamplingParams(temperature=0.0)
    answers = engine.generate(
        Request(str(i), adapter, tuple(range(3, 20)), greedy, max_tokens=12)
        for i, adapter in enumerate(asked)
    )
    engine.close()
    plain, once, twice, summed = (answer.token_ids for answer in answers)
    assert summed == once
    assert len({tuple(tokens) for tokens in (plain, once, twice)}) == 3
