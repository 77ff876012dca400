"""Requests to a small cluster, and what may become of each.

A call resolves a name, submits its choices over a router's connection and reads them to the end. It
must get the tokens of exactly the adapter that it was resolved to, or an error for which there was
a reason.
"""

from dataclasses import dataclass, field

from cluster.adapters.records import ResolvedAdapter
from cluster.adapters.service.pool_actor import AdapterPoolActor
from cluster.engine.dispatcher import MAX_LOSSES
from cluster.errors import BY_NAME, Internal, InvalidAdapter, NotFound, TopworkError, Unavailable
from cluster.request import BASE, Request, TokenEvent
from cluster.router.event_queue import EventQueue
from tests.cluster.engine.life_ranks import turns
from tests.cluster.engine.life_world import Replica
from worker.protocol import SamplingParams
from worker.testing.fake_rank import fake_continuation

# Why a request may fail: which errors that explains.
EXCUSES = {
    "lost": (Unavailable.__name__,),  # replica or connection
    "culprit": (Internal.__name__,),  # ranks died too often in its steps
    "expired": ("DeadlineExceeded",),
    "crowded": ("Overloaded",),
    "forced": (NotFound.__name__,),  # an unload that does not wait
    "late": (NotFound.__name__,),  # unloaded before it was accepted
    "unusable": (InvalidAdapter.__name__,),  # a rank cannot compute it
    "disk": (NotFound.__name__, InvalidAdapter.__name__),  # no directory holds the content
}


@dataclass(frozen=True)
class Wish:
    """What somebody asks for, and how long they stay."""

    name: str  # BASE: the base model
    prompt: tuple[int, ...]
    num_choices: int
    num_tokens: int
    delay: int  # turns between resolving and submitting
    stays: int  # tokens of the first choice after which it is aborted
    salt: str


@dataclass(eq=False)
class Call:
    """One request under way."""

    wish: Wish
    request_id: str
    replica: Replica
    excuses: set[str] = field(default_factory=set)
    resolved: ResolvedAdapter | None = None
    refusal: TopworkError | None = None  # of the name
    needs_disk: bool = False  # nothing but a directory held its adapter when it was resolved
    is_submitted: bool = False
    is_aborted: bool = False
    errors: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def digest(self) -> str | None:
        """The content that it was resolved to."""
        return None if self.resolved is None else self.resolved.digest

    @property
    def is_accepted(self) -> bool:
        """Whether a scheduler has it."""
        return self.replica.has_accepted(f"{self.request_id}/0")

    @property
    def reasons(self) -> set[str]:
        """The excuses that explain an error it had."""
        names = {error.partition(":")[0] for error in self.errors}
        return {excuse for excuse in self.excuses if names & set(EXCUSES[excuse])}

    async def run(self, actor: AdapterPoolActor) -> None:
        """Ask, read, and see that all is as it must be."""
        adapter = BASE
        if self.wish.name != BASE:
            try:
                self.resolved = await actor.resolve(self.wish.name, self.request_id)
            except (NotFound, InvalidAdapter) as error:
                self.refusal = error
                return
            adapter = self.resolved.digest
        await turns(self.wish.delay)
        queue = EventQueue()
        requests = tuple(self._request(adapter, choice) for choice in range(self.wish.num_choices))
        client = self.replica.client
        if self.replica.is_closed:
            self.excuses.add("lost")
        try:
            client.submit(requests, queue)
        except Unavailable:
            self.errors.append(Unavailable.__name__)
            assert client.closed
            return
        self.is_submitted = True
        await self._read(queue, [request.request_id for request in requests])

    def _request(self, adapter: str, choice: int) -> Request:
        return Request(
            request_id=f"{self.request_id}/{choice}",
            adapter=adapter,
            token_ids=self.wish.prompt,
            sampling=SamplingParams(seed=choice),
            max_tokens=self.wish.num_tokens,
            cache_salt=self.wish.salt,
        )

    async def _read(self, queue: EventQueue, open_ids: list[str]) -> None:
        names = list(open_ids)
        self.tokens = [[] for _ in names]
        client, troubles = self.replica.client, self.replica.begin_waiting(self, self.digest)
        while open_ids:
            for event in await queue.get():
                if self.replica.is_closed:
                    self.excuses.add("lost")
                if self.replica.launcher.num_troubles > troubles + MAX_LOSSES:
                    self.excuses.add("culprit")
                self._take(event, self.tokens[names.index(event.request_id)])
                if event.finish_reason is not None:
                    open_ids.remove(event.request_id)
            if len(self.tokens[0]) >= self.wish.stays and names[0] in open_ids:
                client.abort(names[0])
                open_ids.remove(names[0])
                self.is_aborted = True
        self.replica.waiting.pop(self, None)

    def _take(self, event: TokenEvent, tokens: list[int]) -> None:
        tokens += event.token_ids
        if event.error is not None:
            assert event.finish_reason == "error" and event.error.name in BY_NAME
            self.errors.append(f"{event.error.name}: {event.error.message}")
        elif event.finish_reason is not None:
            assert event.finish_reason == "length"
            assert len(tokens) == self.wish.num_tokens, "it ended early"

    def check(self) -> None:
        """Assert that it got what it must, or failed for a reason."""
        for choice, tokens in enumerate(self.tokens):
            wanted = fake_continuation(
                self.digest, self.wish.prompt, self.wish.num_tokens, seed=choice
            )
            assert tuple(tokens) == wanted[: len(tokens)], "tokens of another adapter or prompt"
        allowed = {name for excuse in self.excuses for name in EXCUSES[excuse]}
        for error in self.errors:
            assert error.partition(":")[0] in allowed, f"{error}; only {self.excuses}, {self}"
        is_whole = [len(tokens) == self.wish.num_tokens for tokens in self.tokens]
        if self.is_submitted and not self.errors:
            assert all(is_whole[1:]) and (is_whole[0] or self.is_aborted)
