"""Mistral with a window that prompts are longer than."""

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from cluster.request import BASE, Request
from cluster.scheduler.config import SchedulerConfig
from deploy.local_engine import LocalEngine
from tests.worker.group import random_tokens
from tests.worker.models.families.battery import WindowBattery
from worker.protocol import RankConfig, SamplingParams


class TestMistral(WindowBattery):
    """See `WindowBattery`."""

    @staticmethod
    def build() -> MistralForCausalLM:
        """Return a tiny model."""
        config = MistralConfig(
            vocab_size=131,
            intermediate_size=90,
            num_hidden_layers=2,
            max_position_embeddings=512,
            num_attention_heads=8,
            num_key_value_heads=4,
            hidden_size=64,
            sliding_window=40,
            bos_token_id=None,
            eos_token_id=None,
        )
        return MistralForCausalLM(config)


@pytest.mark.slow
def test_a_stream_of_32768_tokens_holds_the_pages_of_its_window_alone(tmp_path: Path) -> None:
    """Half of it is prompt, in chunks, and half is answer; with Mistral 7B's window of 4,096."""
    torch.manual_seed(7)
    length, window, page = 32_768, 4096, 64
    config = MistralConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=length,
        sliding_window=window,
        bos_token_id=None,
        eos_token_id=None,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    rank = RankConfig(
        model_dir=str(tmp_path),
        rank=0,
        tp=1,
        dtype="float32",
        page_size=page,
        kv_memory_bytes=2**25,
        kv_host_memory_bytes=0,
        num_slots=1,
        max_model_len=length,
        num_threads=None,
    )
    scheduler = SchedulerConfig(
        num_pages=0,  # as many as fit
        num_host_pages=0,
        page_size=page,
        num_slots=1,
        max_running=1,
        max_waiting=1,
        token_budget=512,
        max_model_len=length,
        base_digest="b",
        prefix_cache=False,  # whose checkpoints keep pages for who comes next
    )
    engine = LocalEngine(rank, scheduler)
    try:
        prompt = random_tokens(length // 2, 3)
        request = Request(
            "long", BASE, prompt, SamplingParams(seed=1), max_tokens=length - len(prompt)
        )
        answer, held = engine.submit(request), []
        while engine.step():
            held.append(engine.scheduler.stats().held_window_pages)
    finally:
        engine.close()
    assert len(answer.token_ids) == length // 2
    # After a step what lies behind the window is given back, of a prompt's chunk as well.
    assert max(held) <= window // page + 1
    assert {*held[len(prompt) // 512 :][page:-1]} <= {window // page, window // page + 1}
