"""HAProxy's configuration as Serve writes it, changed into ours: text in, text out.

The text is Ray's, which is pinned to a series; what is looked for in it must be there, or nothing
starts. Only the front door is open to the network: whatever else listens keeps to this machine.
"""

from collections.abc import Iterator

from deploy.serving.haproxy.front_door import FrontDoor

FRONT = "frontend http_frontend"  # Serve's name of where clients come in
# A call is made again, at another router, where the first one ended before a byte of its answer:
# the schedulers have heard that it ended, and what it would have computed comes again. Calls that
# change something are not. What is larger than a buffer cannot be.
NOT_REPEATED = (
    "http-request disable-l7-retry unless METH_GET or "
    "{ path_end /completions /tokenize /detokenize }"
)
# Routers see HAProxy's address; the audit log is to tell the client's.
FORWARDED = "option forwardfor"
# With it, HAProxy does not see that a client leaves if head and body of its request came apart.
_SPLICED = "option splice-request"
_INDENT = "    "


def configured(text: str, door: FrontDoor) -> str:
    """Return what HAProxy is to be started with.

    Args:
        text: the configuration that Serve has written.
        door: what is to be different at the front door.
    """
    lines = [
        changed for line, section in _sections(text) for changed in _changed(line, section, door)
    ]
    assert lines.count(FRONT) == 1, "Serve calls it something else"
    assert lines.count(_INDENT + _head_limit(door)) == 1, "Serve has no option of this name"
    return "\n".join(lines) + "\n"


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line with the line that its section begins with."""
    section = ""
    for line in text.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            section = line.rstrip()
        yield line.rstrip(), section


def _changed(line: str, section: str, door: FrontDoor) -> Iterator[str]:
    """Yield what stands in place of one line."""
    words = line.split()
    if line == FRONT:
        yield line
        yield _INDENT + NOT_REPEATED
        yield _INDENT + FORWARDED
    elif words[:1] == ["bind"]:
        host = door.host if section == FRONT else "127.0.0.1"
        yield _INDENT + " ".join(["bind", _address(words[1], host), *words[2:]])
    elif words[:2] == ["stats", "socket"]:
        # Whoever may write to it may do everything to HAProxy.
        assert "mode 666" in line, "Serve opens its socket in another way"
        yield line.replace("mode 666", "mode 600")
    elif line.strip() == _SPLICED:
        yield _INDENT + _head_limit(door)
    else:
        yield line


def _address(bound: str, host: str | None) -> str:
    """Return `bound`, which is HOST:PORT, with another host."""
    own, _, port = bound.rpartition(":")
    return f"{own if host is None else host}:{port}"


def _head_limit(door: FrontDoor) -> str:
    return f"timeout http-request {door.head_timeout}s"
