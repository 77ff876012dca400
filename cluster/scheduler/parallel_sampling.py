"""The choices of one prompt: the first computes it, the others are held until it has.

Owns the held sequences. A held one exists only while its leader lives and has drawn no token; after
that it waits like any other, and starts on the leader's pages as far as they are still there. Knows
nothing of pages.
"""

from cluster.scheduler.sequence import Sequence, Status


class ParallelSamplingGroups:
    """Held sequences by the one that computes their prompt."""

    def __init__(self) -> None:
        self._held: dict[int, list[Sequence]] = {}  # by the leader's number, in order of arrival
        self._leaders: dict[int, Sequence] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def hold(self, leader: Sequence, followers: list[Sequence]) -> None:
        """Keep sequences back until the leader has computed their prompt or has ended."""
        if followers:
            self._held[leader.seq_id] = followers
            self._leaders[leader.seq_id] = leader
            self._size += len(followers)

    def drop(self, follower: Sequence) -> None:
        """Take out a held sequence that has ended."""
        assert follower.leader is not None, f"sequence {follower.seq_id} follows nobody"
        followers = self._held[follower.leader.seq_id]
        followers.remove(follower)
        self._size -= 1
        if not followers:
            del self._held[follower.leader.seq_id], self._leaders[follower.leader.seq_id]

    def take_free(self) -> list[Sequence]:
        """Return the sequences that need not be held any more, in order of arrival."""
        if not self._held:
            return []
        free: list[Sequence] = []
        for number, leader in tuple(self._leaders.items()):
            has_drawn = len(leader.tokens) > leader.num_prompt_tokens
            if has_drawn or leader.status is Status.FINISHED:
                free += self._held.pop(number)
                del self._leaders[number]
        self._size -= len(free)
        return free

    def of_adapter(self, adapter: str) -> list[Sequence]:
        """Return the held sequences of an adapter."""
        held = (follower for followers in self._held.values() for follower in followers)
        return [follower for follower in held if follower.request.adapter == adapter]
