"""`topwork check --quality`: reads a text with a model as served, and with the reference.

The reference is the same checkpoint in float32, in which nothing is rounded: codes are what they
mean, and weights of 16 bits are themselves. Both are whole engines in this process with one rank
each, so that what is compared is what kernels, adapters and number formats make of a text. A text
is read in windows, one at a time, whose logits are all that is held of it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cluster.request import BASE, Request
from cluster.router.tokenizer import Tokenizer
from cluster.scheduler.config import SchedulerConfig
from deploy.config import ConfigError
from deploy.engine_config import Checked
from deploy.keys.memory import CPU_KV_MEMORY
from deploy.local_engine import LocalEngine
from deploy.machine import Machine
from deploy.memory.weights import ITEM_BYTES, weight_bytes
from deploy.quality.distance import Distance
from deploy.serving.settings import scheduler_settings
from worker.protocol import RankConfig, SamplingParams
from worker.regular_file import read_bounded
from worker.weights.partition import partition

SAMPLE = "sample"  # the name of the text that is there without a file
WINDOW = 256  # tokens that are read together
MAX_TOKENS = 4096  # of a text; the rest is not read
_MAX_BYTES = 2**24
_MIB = 2**20
_SAMPLE_FILE = Path(__file__).parent / "sample.txt"


@dataclass(frozen=True, slots=True)
class Found:
    """What was found of the base model or an adapter."""

    model: str
    distance: Distance

    def as_json(self) -> dict[str, str | int | float]:
        """Return it with the keys of the command's JSON."""
        return {
            "model": self.model,
            "positions": self.distance.num_positions,
            "kl_mean": self.distance.mean,
            "kl_max": self.distance.largest,
            "greedy_agreement": self.distance.agreement,
        }


def measure(
    checked: Checked,
    text: str,
    adapters: Iterable[tuple[str, str]],
    progress: Callable[[str], None],
) -> list[Found]:
    """Return how far the base model and each adapter are from the reference.

    Args:
        checked: the configuration, of which a server would be started.
        text: a file, or `sample`.
        adapters: names and directories.
        progress: hears what is done.

    Raises:
        ConfigError: if the text cannot be read or is too short, the model classifies, or both
            engines do not fit into memory.
    """
    if checked.model.classifier is not None:
        raise ConfigError("quality: the model classifies, and has no next tokens to compare")
    windows = _windows(checked, text)
    _check_memory(checked)
    rank = _served(checked)
    progress("loading the model as it would be served")
    served = _Reader(rank, checked)
    try:
        progress("loading the reference")
        reference = _Reader(_reference(rank), checked)
        try:
            found = [_compare(served, reference, checked.config.base_name, None, windows, progress)]
            for name, directory in adapters:
                one = _compare(served, reference, name, Path(directory), windows, progress)
                found.append(one)
        finally:
            reference.close()
    finally:
        served.close()
    return found


class _Reader:
    """An engine that gives the logits of all positions of a prompt but the last."""

    def __init__(self, rank: RankConfig, checked: Checked) -> None:
        num_pages = -(-(WINDOW + 1) // rank.page_size) + 1
        scheduler = SchedulerConfig(
            base_digest="",
            num_pages=num_pages,
            page_size=rank.page_size,
            max_model_len=rank.max_model_len,
            num_slots=rank.num_slots,
            max_running=1,
            max_waiting=1,
            token_budget=max(WINDOW, rank.page_size),
            prefix_cache=False,
        )
        self._engine = LocalEngine(rank, scheduler, checked.config.max_lora_rank)
        self._rows: list[Tensor] = []
        self._engine.watch_prompt_logits(lambda logits: self._rows.append(logits.float().cpu()))

    def add_adapter(self, directory: Path) -> str:
        """Return what an adapter is asked for by."""
        return self._engine.add_adapter(directory)

    def logits(self, adapter: str, tokens: tuple[int, ...]) -> Tensor:
        """Return the logits [len(tokens) - 1, V] float32 of what follows each token."""
        self._rows.clear()
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
        request = Request("quality", adapter, tokens, sampling, max_tokens=1)
        (answer,) = self._engine.generate([request])
        if answer.error is not None:
            raise ConfigError(f"quality: the text cannot be read: {answer.error}")
        found = torch.cat(self._rows)
        self._rows.clear()
        assert len(found) == len(tokens) - 1, f"{len(found)} rows of {len(tokens)} tokens"
        return found

    def close(self) -> None:
        """End the engine's threads."""
        self._engine.close()


def _compare(
    served: _Reader,
    reference: _Reader,
    name: str,
    directory: Path | None,
    windows: list[tuple[int, ...]],
    progress: Callable[[str], None],
) -> Found:
    digests = [BASE, BASE]
    if directory is not None:
        digests = [reader.add_adapter(directory) for reader in (served, reference)]
    distance = Distance()
    for number, window in enumerate(windows, 1):
        progress(f"{name}: part {number} of {len(windows)} of the text")
        distance.add(served.logits(digests[0], window), reference.logits(digests[1], window))
    return Found(name, distance)


def _served(checked: Checked) -> RankConfig:
    """Return the rank of a server, alone."""
    rank = scheduler_settings(checked).rank
    num_slots = min(rank.num_slots, 2)
    return replace(
        rank,
        model_dir=str(checked.model_dir),
        revision=None,
        tp=1,
        num_slots=num_slots,
        # All that a GPU has left would be one engine's, and a window needs little.
        kv_memory_bytes=rank.kv_memory_bytes or CPU_KV_MEMORY,
        kv_host_memory_bytes=0,
        max_model_len=checked.max_model_len,
    )


def _reference(rank: RankConfig) -> RankConfig:
    """Return a rank of the same model in float32; what is not named is as it is by default."""
    assert rank.kv_memory_bytes is not None, "that of a rank that is served"
    return RankConfig(
        model_dir=rank.model_dir,
        rank=0,
        tp=1,
        dtype="float32",
        device=rank.device,
        page_size=rank.page_size,
        kv_memory_bytes=4 * rank.kv_memory_bytes,  # where those have one byte, these have four
        adapter_memory_bytes=rank.adapter_memory_bytes,
        max_num_batched_tokens=rank.max_num_batched_tokens,
        max_num_seqs=rank.max_num_seqs,
        num_slots=rank.num_slots,
        max_model_len=rank.max_model_len,
        num_threads=rank.num_threads,
    )


def _windows(checked: Checked, text: str) -> list[tuple[int, ...]]:
    """Return the tokens of a text in windows of at least two.

    Raises:
        ConfigError: if there is no such text, or not so much of it.
    """
    file = _SAMPLE_FILE if text == SAMPLE else Path(text).expanduser()
    try:
        content = read_bounded(file, _MAX_BYTES).decode()
        tokens = Tokenizer.load(checked.model_dir).encode(content, add_special_tokens=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"quality: {file}: {error}") from error
    width = min(WINDOW, checked.max_model_len - 1)
    starts = range(0, min(len(tokens), MAX_TOKENS), width)
    windows = [tokens[start : min(start + width, MAX_TOKENS)] for start in starts]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ConfigError(f"quality: {file} has {len(tokens)} tokens: two are needed")
    return windows


def _check_memory(checked: Checked) -> None:
    """Refuse two engines that this machine has no room for now."""
    if checked.device != "cpu":
        return  # torch says what a GPU has no room for
    whole, config = partition(checked.model, 1, 0), checked.config
    bytes_of = partial(weight_bytes, checked.model, whole, is_packed=True)
    needed = bytes_of(ITEM_BYTES[config.dtype], method=config.quantization)
    needed += bytes_of(ITEM_BYTES["float32"])
    free = Machine.here().free_memory
    if needed > free:
        raise ConfigError(
            f"quality: the model in {config.quantization or config.dtype} and in float32 takes "
            f"{needed // _MIB:,} MiB together, and {free // _MIB:,} MiB are free"
        )
