"""Content between calls."""

import re

from cluster.router.parser.text_source import SPACES, Steps, Take, TextSource


class Content:
    """Content up to a marker. White space before a call is a part of the call."""

    def __init__(self, marker: str) -> None:
        assert marker.count(marker[0]) == 1, "its beginning may be in it only once"
        self.marker = marker
        other = rf"[^{re.escape(marker[0])} \t\r\n]"
        self._plain = re.compile(rf"(?:{other}++|[ \t\r\n]++(?={other}))++")

    def until_marker(self, source: TextSource, take: Take) -> Steps[str | None]:
        """Consume content, which `take` gets, and a marker; return what may belong to a call.

        None if the text has ended first.
        """
        spaces: list[str] = []
        while (yield from source.peek()):
            found = source.take(self._plain)
            if not found:
                space = source.take(SPACES)
                if space:
                    spaces.append(space)
                    continue
                found = yield from source.one_of((self.marker,))
                if found == self.marker:
                    return "".join(spaces) + found
            take("".join(spaces) + found)
            spaces.clear()
        take("".join(spaces))
        return None
