"""The one way of events into a scheduler: which method handles which, and the journal beside it.

Live and replayed events take it alike, so a replay needs no list of the scheduler's calls.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import astuple

from cluster.scheduler.events import Event, Journal

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

_HANDLERS: dict[type[Event], Callable[..., Any]] = {}


def handles(kind: type[Event]) -> Callable[[HandlerT], HandlerT]:
    """Make a method of an `EventHandlers` what handles an event; it takes the event's fields."""

    def register(handler: HandlerT) -> HandlerT:
        _HANDLERS[kind] = handler
        return handler

    return register


class EventHandlers:
    """What changes by events only.

    Without a journal a call of a handler is just that call; with one it goes through `apply`.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        if journal is not None:
            for kind, handler in _HANDLERS.items():
                setattr(self, handler.__name__, self._applying(kind))

    def apply(self, event: Event) -> Any:
        """Carry out an event, and write it to the journal, if there is one, with its result."""
        handler, journal = _HANDLERS[type(event)], self._journal
        if journal is None:
            return handler(self, *astuple(event))
        event = journal.received(event)
        try:
            result = handler(self, *astuple(event))
        except Exception as error:
            journal.raised(event, error)
            raise
        journal.applied(event, result)
        return result

    def _applying(self, kind: type[Event]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.apply(kind(*args, **kwargs))
