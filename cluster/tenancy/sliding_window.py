"""What was spent in the last minute, by half seconds.

Owns the meaning of "a minute": in no 60 seconds is more spent than the limit, wherever they begin.
A bucket that is refilled would let through twice the limit in the first minute after a pause. Knows
no clock: the slot that it is comes with each call.
"""

from bisect import bisect_left
from collections.abc import Iterator

SLOT_SECONDS = 0.5
# Two moments less than a minute apart lie in slots that are so many apart or fewer.
LAST_AGE = round(60 / SLOT_SECONDS)
_NEAR = 2  # slots by which the clocks of two processes may differ in when something was spent


def slot_of(now: float) -> int:
    """Return the slot of a moment, in seconds."""
    return int(now / SLOT_SECONDS)


class SlidingWindow:
    """Amounts by the slot that they were spent in; those of later slots are owed."""

    def __init__(self) -> None:
        self.total = 0  # of the window, and what is owed
        self._slots: list[int] = []  # ascending
        self._amounts: list[int] = []

    def advance(self, slot: int) -> None:
        """Forget what has left the window of this slot."""
        end = bisect_left(self._slots, slot - LAST_AGE)
        if end:
            self.total -= sum(self._amounts[:end])
            del self._slots[:end], self._amounts[:end]

    def spend(self, slot: int, amount: int) -> None:
        """Book an amount, whether there is room for it or not."""
        if not amount:
            return
        index = bisect_left(self._slots, slot)
        if index < len(self._slots) and self._slots[index] == slot:
            self._amounts[index] += amount
        else:
            self._slots.insert(index, slot)
            self._amounts.insert(index, amount)
        self.total += amount

    def owe(self, slot: int, amount: int, limit: int) -> None:
        """Book what has been used already: what has no room, where room will be.

        So that no minute has more than the limit, and nothing is forgiven.
        """
        self.advance(slot)
        room = max(0, limit - self.total)
        self.spend(slot, min(room, amount))
        rest = amount - min(room, amount)
        index = 0
        while rest and index < len(self._slots):
            leaves = self._slots[index] + LAST_AGE + 1
            part = min(rest, self._amounts[index] - self._spent_in(leaves))
            if leaves > slot and part > 0:
                self.spend(leaves, part)
                rest -= part
            index += 1

    def give_back(self, slot: int, amount: int) -> int:
        """Take back what was spent in a slot or next to it; return how much of it was found."""
        found = 0
        near = [one for one in self._slots if abs(one - slot) <= _NEAR]
        for one in sorted(near, key=lambda one: (abs(one - slot), one)):
            index = bisect_left(self._slots, one)
            part = min(amount - found, self._amounts[index])
            self._amounts[index] -= part
            found += part
            if not self._amounts[index]:
                del self._slots[index], self._amounts[index]
        self.total -= found
        return found

    def slots_until(self, slot: int, amount: int) -> int:
        """Return after how many slots so much of the total has left the window."""
        for one, spent in self.entries():
            if amount <= 0:
                break
            amount -= spent
            slot_then = one + LAST_AGE + 1
            if amount <= 0:
                return max(0, slot_then - slot)
        return 0

    def _spent_in(self, slot: int) -> int:
        index = bisect_left(self._slots, slot)
        found = index < len(self._slots) and self._slots[index] == slot
        return self._amounts[index] if found else 0

    def entries(self) -> Iterator[tuple[int, int]]:
        """Yield (slot, amount) in the order of slots."""
        yield from zip(self._slots, self._amounts, strict=True)
