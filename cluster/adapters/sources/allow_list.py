"""Where adapters may be fetched from, and how such places are written.

A place is hf://org/name@revision, s3://bucket/key, gs://bucket/key or https://host/path of a
folder with the two files of an adapter. What could be read in two ways is refused, not cleaned:
names, hosts and paths come from callers, and what is compared must be what is fetched.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.adapters.peft.strict_json import shown
from cluster.errors import InvalidRequest

PARAM = "lora_path"  # of the call that names the place
HUB = "hf"
BUCKETS = ("s3", "gs")
WEB = ("https", "http")
SCHEMES = (HUB, *BUCKETS, *WEB)
MAX_CHARS = 2048

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_SEGMENT = re.compile(r"[A-Za-z0-9_=+,~:-][A-Za-z0-9._=+,~:-]*")  # no %, no "..", no dot file
_HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(?::[1-9][0-9]{0,4})?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]*")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")


@dataclass(frozen=True, slots=True)
class Address:
    """A folder somewhere else."""

    scheme: str
    path: str  # without a slash at its end; begins with the host, bucket or organisation
    revision: str | None = None  # of a hub

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.scheme}://{self.path}{revision}"

    @property
    def parts(self) -> tuple[str, ...]:
        """The path in its parts."""
        return tuple(self.path.split("/"))


class AllowList:
    """Prefixes of what may be fetched; an empty one allows nothing.

    A prefix ends where a part of a path does: https://host/a covers https://host/a/b, not
    https://host/ab.
    """

    def __init__(self, prefixes: Iterable[str]) -> None:
        """Take prefixes as an operator writes them.

        Raises:
            ValueError: naming the one that cannot be understood.
        """
        self._prefixes = tuple(parse_prefix(text) for text in prefixes)

    def address(self, text: str) -> Address | None:
        """Return where to fetch an adapter from; None if the text is a path on this host.

        A text without a scheme is a hub's id if it looks like one and may be fetched.

        Raises:
            InvalidRequest: if it may not be fetched, or is not well-formed.
        """
        match = _SCHEME.fullmatch(text)
        if match is None:
            return self._hub_id(text)
        try:
            address = _parse(match[1], match[2])
        except ValueError as error:
            raise InvalidRequest(f"{shown(text)}: {error}", PARAM) from error
        if not self._covers(address):
            raise InvalidRequest(
                f"{shown(text)} may not be fetched: no prefix of adapter_sources covers it", PARAM
            )
        return address

    def _hub_id(self, text: str) -> Address | None:
        repo, at, revision = text.partition("@")
        if len(text) > MAX_CHARS or not _REPO.fullmatch(repo):
            return None
        if at and not _REVISION.fullmatch(revision):
            return None
        address = Address(HUB, repo, revision or None)
        return address if self._covers(address) else None

    def _covers(self, address: Address) -> bool:
        return any(
            prefix.scheme == address.scheme
            and (not prefix.path or f"{address.path}/".startswith(f"{prefix.path}/"))
            for prefix in self._prefixes
        )


def parse_prefix(text: str) -> Address:
    """Return a prefix of addresses.

    Raises:
        ValueError: if it is none, or would let everything of a kind in that only a host or a
            bucket can narrow down.
    """
    match = _SCHEME.fullmatch(text)
    if match is None:
        raise ValueError(f"{shown(text)} is not of the form SCHEME://...")
    scheme, rest = match[1].lower(), match[2]
    if scheme == HUB and not rest.strip("/"):
        return Address(HUB, "")
    try:
        if scheme == HUB and "/" not in rest.strip("/"):
            _check_parts(rest.strip("/"))
            return Address(HUB, rest.strip("/"))
        return _parse(scheme, rest)
    except ValueError as error:
        raise ValueError(f"{shown(text)}: {error}") from None


def _parse(scheme: str, rest: str) -> Address:
    """Return what stands behind a scheme, or raise ValueError with the reason."""
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise ValueError(f"adapters come from {', '.join(f'{one}://' for one in SCHEMES)}")
    if len(rest) > MAX_CHARS:
        raise ValueError(f"over {MAX_CHARS} characters")
    if "?" in rest or "#" in rest:
        raise ValueError("a query or fragment is not taken: use a folder of its own")
    revision: str | None = None
    if scheme == HUB:
        rest, at, found = rest.partition("@")
        if at and not _REVISION.fullmatch(found):
            raise ValueError("the revision is malformed")
        revision = found or None
    elif "@" in rest:
        raise ValueError("credentials do not belong into an address")
    first, _, path = rest.partition("/")
    if scheme in WEB:
        first = _host(scheme, first)
    elif scheme in BUCKETS and not _BUCKET.fullmatch(first):
        raise ValueError("the bucket is malformed")
    path = path.rstrip("/") if not path.endswith("//") else path
    whole = f"{first}/{path}" if path else first
    _check_parts(path if scheme in (*WEB, *BUCKETS) else whole)
    if scheme == HUB and not _REPO.fullmatch("/".join(whole.split("/")[:2])):
        raise ValueError("a hub's id is of the form hf://org/name@revision")
    return Address(scheme, whole, revision)


def _host(scheme: str, text: str) -> str:
    host = text.lower()
    if not _HOST.fullmatch(host) or ".." in host:
        raise ValueError("the host is malformed")
    return host.removesuffix(":443" if scheme == "https" else ":80")


def _check_parts(path: str) -> None:
    for part in path.split("/") if path else ():
        if not _SEGMENT.fullmatch(part):
            raise ValueError(
                f"the part {shown(part)} of the path is not taken: parts are letters, digits and "
                "._=+,~:- and do not begin with a dot"
            )
