"""The whole engine in one plain process: a scheduler and its ranks, without Ray or sockets.

For tests, profiles and machines that have a GPU but no Ray. Ranks are threads when there are
several. The scheduler, the plans and the ranks are the ones that a cluster runs.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from cluster.adapters.peft.checks import AdapterLimits
from cluster.adapters.peft.reader import read_adapter
from cluster.adapters.sharding import cut_all
from cluster.request import FinishReason, Request, TokenEvent, parts_of
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.scheduler import Scheduler
from worker.distributed.communicator import Communicator, SingleRank
from worker.distributed.thread_group import ThreadGroup
from worker.engine.rank import Rank
from worker.lora.shard import AdapterShard
from worker.model_config_reader import read_model_config
from worker.pools import PageCounts, fewest
from worker.protocol import GENESIS, RankConfig, StepOutput, TokenLogprobs, encode_plan
from worker.weights.partition import sums_are_exact


@dataclass(slots=True)
class Answer:
    """What a request has got so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    pooled: bytes = b""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def take(self, event: TokenEvent) -> None:
        """Add the news of one step."""
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        self.finish_reason = event.finish_reason
        self.pooled = event.pooled
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        if event.error is not None:
            self.error = event.error.message


class LocalEngine:
    """Serves requests one step at a time.

    `rank` and `scheduler` configure both sides; the numbers of pages come from the memory budgets
    of `rank`, unless `scheduler` asks for fewer.
    """

    def __init__(
        self, rank: RankConfig, scheduler: SchedulerConfig, max_lora_rank: int = 64
    ) -> None:
        self._model = read_model_config(Path(rank.model_dir))
        self._limits = AdapterLimits(max_lora_rank=max_lora_rank)
        self._has_exact_sums = sums_are_exact(rank.quantization, deterministic=rank.deterministic)
        communicators: tuple[Communicator, ...] = (SingleRank(),)
        if rank.tp > 1:
            communicators = ThreadGroup(rank.tp).communicators()
        self._ranks = [
            Rank(replace(rank, rank=index), communicator)
            for index, communicator in enumerate(communicators)
        ]
        self._threads = ThreadPoolExecutor(rank.tp, thread_name_prefix="rank")
        infos = list(self._threads.map(Rank.load, self._ranks))
        max_pages = [info.max_pages for info in infos if info.max_pages is not None]
        if len(max_pages) < len(infos):  # GPUs are asked once all have loaded
            max_pages = list(self._threads.map(Rank.measure_pages, self._ranks))
        pages = _at_most(scheduler.pages, fewest(max_pages))
        host_pages = _at_most(scheduler.host_pages, fewest(info.max_host_pages for info in infos))
        for one in self._ranks:
            one.allocate(pages, host_pages)
        self.scheduler = Scheduler(scheduler.with_pages(infos[0].window, pages, host_pages))
        self._digest = GENESIS
        self._shards: dict[str, tuple[AdapterShard, ...]] = {}
        self._answers: dict[int, Answer] = {}

    def add_adapter(self, directory: Path) -> str:
        """Read an adapter from disk and return its digest; a slot is taken when it is used."""
        adapter = read_adapter(directory, self._model, self._limits)
        tp = len(self._ranks)
        self._shards[adapter.digest] = cut_all(adapter, tp, has_exact_sums=self._has_exact_sums)
        return adapter.digest

    def submit(self, request: Request) -> Answer:
        """Queue a request; the answer fills as steps are run."""
        answer = Answer()
        self._answers[self.scheduler.add(request)] = answer
        return answer

    def submit_choices(self, requests: Sequence[Request]) -> list[Answer]:
        """Queue the choices of one prompt, which is computed once."""
        answers = [Answer() for _ in requests]
        self._answers.update(zip(self.scheduler.add_all(tuple(requests)), answers, strict=True))
        return answers

    def step(self) -> bool:
        """Run one step; False if there was nothing to do."""
        plan = self.scheduler.schedule()
        loads = self.scheduler.take_loads()
        for load in loads:
            for slot, adapter in load.clears:
                for rank in self._ranks:
                    rank.clear_slot(slot, adapter)
            self._load(load.slot, load.adapter)
            self.scheduler.adapter_ready(load.adapter)
        if plan is None:
            return bool(loads)
        frame, self._digest = encode_plan(plan, self._digest)
        for seq_id, event in self.scheduler.commit(self._run(frame)):
            self._answers[seq_id].take(event)
            if event.finish_reason is not None:
                del self._answers[seq_id]
        return True

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.step():
            pass

    def generate(self, requests: Iterable[Request]) -> list[Answer]:
        """Serve requests to their ends, all together, and return the answers in order."""
        answers = [self.submit(request) for request in requests]
        self.run()
        return answers

    def watch_prompt_logits(self, watch: Callable[[Tensor], None]) -> None:
        """Have the logits [R, V] heard that log-probabilities of prompts are made of, in order."""
        self._ranks[0].watch_prompt_logits(watch)

    def close(self) -> None:
        """End the threads of the ranks."""
        self._threads.shutdown()

    def _load(self, slot: int, adapter: str) -> None:
        """Put an adapter, or a weighted sum of adapters that were added, into every rank's slot."""
        parts = parts_of(adapter)
        weights = [weight for _, weight in parts]
        for index, rank in enumerate(self._ranks):
            shards = [self._shards[digest][index] for digest, _ in parts]
            rank.load_adapter(slot, adapter, weights, shards)

    def _run(self, frame: bytes) -> StepOutput:
        replies = list(self._threads.map(lambda rank: rank.step(frame), self._ranks))
        output: StepOutput | None = replies[0].output
        assert output is not None, "rank 0 answers every plan"
        return output


def _at_most(asked: PageCounts, fitting: PageCounts) -> PageCounts:
    """Return the numbers of pages to make; where 0 are asked for, as many as fit."""
    return PageCounts(
        full=min(asked.full or fitting.full, fitting.full),
        window=min(asked.window or fitting.window, fitting.window),
        state=min(asked.state or fitting.state, fitting.state),
    )
