"""Pages of long listings, with OpenAI's cursor: `limit` entries after the name `after`.

Knows nothing of what is listed but its names.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from cluster.adapters.records import AdapterRecord
from cluster.errors import InvalidRequest

MAX_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Page:
    """What a caller wants to see of a listing; without a limit, all of it."""

    limit: int | None
    after: str  # "": from the start

    def cut(self, records: Sequence[AdapterRecord]) -> tuple[Sequence[AdapterRecord], bool]:
        """Return (the entries of this page, whether there are more) of what is ordered by name."""
        begin = bisect_right(records, self.after, key=lambda record: record.name)
        end = len(records) if self.limit is None else begin + self.limit
        return records[begin:end], end < len(records)


def page_of(http: HttpRequest) -> Page:
    """Return the page that a query string asks for.

    Raises:
        InvalidRequest: if `limit` is no number in range.
    """
    limit = http.query_params.get("limit")
    if limit is not None and not (
        limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= MAX_LIMIT
    ):
        raise InvalidRequest(f"limit: must be a number from 1 to {MAX_LIMIT}", "limit")
    return Page(None if limit is None else int(limit), http.query_params.get("after", ""))
