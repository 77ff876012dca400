"""A group of ranks in threads, driven by plans that a test writes or that `generate` writes."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from tests.patience import PATIENCE
from tests.ports import free_port
from worker.distributed.communicator import Communicator, SingleRank
from worker.distributed.parallel import join_group
from worker.distributed.thread_group import ThreadGroup
from worker.engine.rank import Rank
from worker.engine.step_server import StartedStep
from worker.lora.shard import AdapterShard, LoraEntry
from worker.model_config_reader import read_model_config
from worker.pools import PageCounts
from worker.protocol import (
    GENESIS,
    PENDING_TOKEN,
    Chunk,
    PageCopy,
    Plan,
    RankConfig,
    SampledToken,
    SamplingParams,
    SequenceStart,
    StepOutput,
    StepReply,
    encode_plan,
)
from worker.weights.partition import Partition, partition

PAGE = 16
NUM_STATES = 8  # pages, of a model with layers that have states
GREEDY = SamplingParams(temperature=0.0, num_logprobs=131)


@dataclass
class Prompt:
    """A sequence for `RankGroup.generate`."""

    token_ids: tuple[int, ...]
    slot: int | None = None
    sampling: SamplingParams = GREEDY
    first_step: int = 1  # when it joins the others
    sampled: list[SampledToken] = field(default_factory=list)

    @property
    def sampled_ids(self) -> list[int]:
        return [token.token_id for token in self.sampled]


class RankGroup:
    """Ranks of one model that have loaded and allocated."""

    def __init__(
        self,
        path: Path,
        *,
        tp: int = 1,
        dtype: Literal["bfloat16", "float32"] = "float32",
        quantization: Literal["int8", "int4"] | None = None,
        num_pages: int = 64,
        num_host_pages: int = 16,
        num_window_pages: int = 64,
        num_slots: int = 4,
        places: Sequence[Communicator] | None = None,
    ) -> None:
        self.config = read_model_config(path)
        if places is None:
            places = (
                ThreadGroup(tp, timeout=PATIENCE).communicators() if tp > 1 else (SingleRank(),)
            )
        self.ranks = [
            Rank(
                RankConfig(
                    model_dir=str(path),
                    rank=rank,
                    tp=tp,
                    dtype=dtype,
                    quantization=quantization,
                    page_size=PAGE,
                    kv_memory_bytes=1 << 24,
                    kv_host_memory_bytes=1 << 23,
                    num_slots=num_slots,
                    max_model_len=256,
                    num_threads=None,
                ),
                place,
            )
            for rank, place in enumerate(places)
        ]
        self._threads = ThreadPoolExecutor(tp)
        self.infos = list(self._threads.map(Rank.load, self.ranks))
        self._window = self.infos[0].window
        self._has_states = self.infos[0].state_page_bytes > 0
        pages = PageCounts(
            num_pages, num_window_pages * (self._window > 0), NUM_STATES * self._has_states
        )
        for rank in self.ranks:
            rank.allocate(pages, PageCounts(num_host_pages))
        list(self._threads.map(Rank.warm_up, self.ranks))
        self.digest = GENESIS
        self.last_step = 0
        # Pages are dealt from the middle, so that no page number equals its place in a table.
        self._free = [*range(num_pages // 2, num_pages), *range(num_pages // 2)]
        # What a window has left is given out again, the last first.
        self._free_window = list(range(num_window_pages))
        self._next_id = 0

    def close(self) -> None:
        self._threads.shutdown()

    def step(
        self,
        chunks: Sequence[Chunk] = (),
        starts: Sequence[SequenceStart] = (),
        ends: Sequence[int] = (),
        copies: Sequence[PageCopy] = (),
    ) -> StepOutput:
        """Run one plan on every rank and return rank 0's answer."""
        return self.end(self.start(chunks, starts, ends, copies))

    def start(
        self,
        chunks: Sequence[Chunk] = (),
        starts: Sequence[SequenceStart] = (),
        ends: Sequence[int] = (),
        copies: Sequence[PageCopy] = (),
    ) -> list[StartedStep]:
        """Start one plan on every rank."""
        frame = self.frame(chunks, starts, ends, copies)
        return list(self._threads.map(lambda rank: rank.start(frame), self.ranks))

    def end(self, started: Sequence[StartedStep]) -> StepOutput:
        """Wait for a step that was started and return rank 0's answer."""
        replies = [one.reply() for one in started]
        assert all(reply.output is None for reply in replies[1:])
        output = replies[0].output
        assert output is not None
        return output

    def frame(
        self,
        chunks: Sequence[Chunk] = (),
        starts: Sequence[SequenceStart] = (),
        ends: Sequence[int] = (),
        copies: Sequence[PageCopy] = (),
    ) -> bytes:
        """Return the frame of the next plan without sending it to anyone."""
        self.last_step += 1
        plan = Plan(self.last_step, tuple(ends), tuple(starts), tuple(chunks), tuple(copies))
        frame, self.digest = encode_plan(plan, self.digest)
        return frame

    def send(self, frames: Sequence[bytes]) -> list[Future[StepReply]]:
        """Give each rank a frame of its own, all at once."""
        return [
            self._threads.submit(rank.step, frame)
            for rank, frame in zip(self.ranks, frames, strict=True)
        ]

    def load_adapter(self, slot: int, adapter: "TinyAdapter") -> None:
        tp = len(self.ranks)
        for index, rank in enumerate(self.ranks):
            shard = adapter.cut(partition(self.config, tp, index))
            rank.load_adapter(slot, adapter.digest, (1.0,), (shard,))

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_tokens: int,
        chunk_size: int = 64,
        *,
        is_ahead: bool = False,
    ) -> None:
        """RowSampling tokens for all prompts, prefills in chunks beside the decodes of others.

        With `is_ahead` no plan says what the step before it has sampled, and each is started before
        the one before it is asked for its reply.
        """
        ids = {self._next_id + i: prompt for i, prompt in enumerate(prompts)}
        self._next_id += len(prompts)
        computed: dict[int, int] = {}
        pages: dict[int, int] = {}
        windows: dict[int, list[int]] = {seq_id: [] for seq_id in ids}
        num_sampled = dict.fromkeys(ids, 0)
        finished: list[int] = []
        running: list[tuple[list[Chunk], list[StartedStep]]] = []
        turn = 0
        while len(finished) < len(ids):
            turn += 1
            starts: list[SequenceStart] = []
            chunks: list[Chunk] = []
            for seq_id, prompt in ids.items():
                if seq_id in finished or prompt.first_step > turn:
                    continue
                if seq_id not in computed:
                    computed[seq_id] = pages[seq_id] = 0
                    state_page = seq_id % NUM_STATES if self._has_states else None
                    starts.append(_start(seq_id, prompt, state_page))
                tokens = (*prompt.token_ids, *prompt.sampled_ids)
                first = computed[seq_id]
                part = tokens[first : first + chunk_size]
                if is_ahead and first >= len(prompt.token_ids):
                    part = (PENDING_TOKEN,)
                computed[seq_id] = first + len(part)
                missing = -(-computed[seq_id] // PAGE) - pages[seq_id]
                given = tuple(self._free.pop(0) for _ in range(missing))
                pages[seq_id] += missing
                window_given = self._move_window(windows[seq_id], first, missing)
                samples = computed[seq_id] >= len(prompt.token_ids)
                num_sampled[seq_id] += samples
                if num_sampled[seq_id] == num_tokens:
                    finished.append(seq_id)
                chunks.append(Chunk(seq_id, first, part, given, samples, (), window_given))
            running.append((chunks, self.start(chunks, starts)))
            if len(running) == (2 if is_ahead else 1):
                self._take(ids, *running.pop(0))
        for chunks, started in running:
            self._take(ids, chunks, started)
        self.step(ends=finished)

    def _move_window(self, window: list[int], first: int, missing: int) -> tuple[int, ...]:
        """Return pages for a chunk from position `first` on, maybe those that its window leaves.

        `window` is the page table of layers with a window, -1 where it has left a page.
        """
        if not self._window:
            return ()
        for at in range(max(0, first + 1 - self._window) // PAGE):
            if window[at] >= 0:
                self._free_window.append(window[at])
                window[at] = -1
        given = tuple(self._free_window.pop() for _ in range(missing))
        window += given
        return given

    def _take(
        self, prompts: Mapping[int, Prompt], chunks: list[Chunk], started: list[StartedStep]
    ) -> None:
        """Wait for a step and give each prompt the token that was sampled."""
        output = self.end(started)
        assert output.failed == ()
        assert [t.seq_id for t in output.tokens] == [c.seq_id for c in chunks if c.samples]
        for token in output.tokens:
            prompts[token.seq_id].sampled.append(token)


def _start(seq_id: int, prompt: Prompt, state_page: int | None) -> SequenceStart:
    num_tokens = len(prompt.token_ids)
    start = SequenceStart(seq_id, prompt.slot, prompt.sampling, num_tokens, (), 0, ())
    return structs.replace(start, state_page=state_page)


@dataclass(frozen=True)
class TinyAdapter:
    """Random LoRA weights: (layer, module) to (A, B, scaling)."""

    digest: str
    tensors: dict[tuple[int, str], tuple[Tensor, Tensor, float]]

    def cut(self, part: Partition) -> AdapterShard:
        """Return one rank's shard, in float32."""
        entries: list[LoraEntry] = []
        data = bytearray(b"\0")  # so that no tensor is aligned
        for (layer, module), (a, b, scaling) in self.tensors.items():
            (rows,), columns = part.slices(module)
            offsets = []
            a_part, b_part = a[:, columns.start : columns.stop], b[rows.start : rows.stop]
            for tensor in (a_part, b_part.T):
                offsets.append(len(data))
                data += tensor.contiguous().numpy().tobytes()
            a_shape, b_shape = tuple(a_part.shape), tuple(b_part.shape)
            entries.append(
                LoraEntry(
                    layer, module, a.shape[0], scaling, offsets[0], a_shape, offsets[1], b_shape
                )
            )
        buffer = np.frombuffer(bytes(data), dtype=np.uint8)  # read-only, as Ray's are
        return AdapterShard(self.digest, part.rank, part.tp, "float32", tuple(entries), buffer)


def random_tokens(length: int, seed: int) -> tuple[int, ...]:
    """Return a prompt of the tiny models' vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 131, (length,), generator=generator).tolist())


def free_address() -> str:
    """Return an address where a store can be opened."""
    return f"tcp://127.0.0.1:{free_port()}"


def join_in_threads(size: int, timeout: float) -> list[Communicator]:
    """Return the places of a group that has met over TCP, in rank order."""
    address = free_address()
    with ThreadPoolExecutor(size) as threads:
        joining = [
            threads.submit(join_group, address, rank, size, "cpu", timeout, b"secret")
            for rank in range(size)
        ]
        return [place.result() for place in joining]
