"""Parallel sampling (`n`, `best_of`): the first choice computes the prompt, the others are held.

A held sequence exists only while its leader lives and has drawn no token; after that it waits like
any other, and starts on the leader's pages as far as they are still there.
"""

from cluster.scheduler.sequence import Sequence
from cluster.tenancy.shared_room import SharedRoom


class ParallelSamplingGroups:
    """Held sequences by the one that computes their prompt; in `room` they have places, too."""

    def __init__(self, room: SharedRoom) -> None:
        self._room = room
        self._held: dict[int, list[Sequence]] = {}  # by the leader's number, in order of arrival
        self._due: list[int] = []  # leaders that have drawn a token or have ended
        self._size = 0

    @property
    def has_released(self) -> bool:
        """Whether `take_released` would return some."""
        return bool(self._due)

    def __len__(self) -> int:
        return self._size

    def hold(self, leader: Sequence, followers: list[Sequence]) -> None:
        """Keep sequences back until `release` of their leader."""
        if followers:
            self._held[leader.seq_id] = followers
            self._size += len(followers)
            for follower in followers:
                self._room.take(follower.flow.tenant, 1, follower.flow.share.weight)

    def release(self, leader_id: int) -> None:
        """Note that a sequence has drawn a token or has ended; it may lead nobody."""
        if leader_id in self._held:
            self._due.append(leader_id)

    def drop(self, follower: Sequence) -> None:
        """Take out a held sequence that has ended."""
        assert follower.leader is not None, f"sequence {follower.seq_id} follows nobody"
        followers = self._held[follower.leader.seq_id]
        followers.remove(follower)
        self._size -= 1
        self._room.give_back(follower.flow.tenant, 1)
        if not followers:
            del self._held[follower.leader.seq_id]

    def take_released(self) -> list[Sequence]:
        """Return the sequences that need not be held any more, in order of arrival."""
        due, self._due = self._due, []
        released: list[Sequence] = []
        for leader_id in sorted(due):
            released += self._held.pop(leader_id, ())
        self._size -= len(released)
        for follower in released:
            self._room.give_back(follower.flow.tenant, 1)
        return released

    def of_adapter(self, adapter: str) -> list[Sequence]:
        """Return the held sequences of an adapter."""
        held = (follower for followers in self._held.values() for follower in followers)
        return [follower for follower in held if follower.request.adapter == adapter]
