"""Thoughts before an answer, between <think> and </think>.

The white space beside the tags belongs to them. Where the prompt has opened the thought, the answer
begins in it.
"""

from cluster.router.parser.content import Content
from cluster.router.parser.message import Collector
from cluster.router.parser.text_source import SPACES, Steps, TextSource

OPEN, CLOSE = "<think>", "</think>"


def thoughts(source: TextSource, out: Collector, *, is_open: bool) -> Steps[None]:
    """Consume the thoughts at the beginning of an answer, if there are any."""
    source.record()
    yield from source.run(SPACES)
    found = yield from source.one_of((OPEN,))
    recorded = source.recorded()
    if found == OPEN:
        yield from source.run(SPACES)
    elif is_open:
        source.unread(recorded.lstrip(" \t\r\n"))
    else:
        source.unread(recorded)
        return
    before = yield from Content(CLOSE).until_marker(source, out.reasoning)
    if before is not None:
        yield from source.run(SPACES)
