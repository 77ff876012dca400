"""HAProxy's configuration as Serve writes it, changed into ours: text in, text out.

The text is Ray's, which is pinned to a series; what is looked for in it must be there, or nothing
starts. Only the front door is open to the network: whatever else listens keeps to this machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.serving.haproxy.front_door import FrontDoor

FRONT = "frontend http_frontend"  # Serve's name of where clients come in
# A call is made again, at another router, where the first one ended before a byte of its answer:
# the schedulers have heard that it ended, and what it would have computed comes again. Calls that
# change something are not. What is larger than a buffer cannot be, nor what is passed on before all
# of it has come, as clients send heads and bodies apart: HAProxy waits for the body.
NOT_REPEATED = (
    "http-request disable-l7-retry unless METH_GET or "
    "{ path_end /completions /tokenize /detokenize }"
)
# Routers see HAProxy's address; the audit log is to tell the client's.
FORWARDED = "option forwardfor"
# What HAProxy says itself has the shape of OpenAI's errors and of Anthropic's, whose clients want a
# `type` besides.
#
# A router gives a body up with 408. HAProxy would pass that on, and wait for the body as for any;
# what it says itself ends the connection.
KEPT_ID = "http-response set-var(txn.request_id) res.hdr(x-request-id) if { status 408 }"
_LATE_BODY = (
    """'{"type": "error", "error": {"message": "the body has not come in time", """
    """"type": "timeout_error", "param": null, "code": 408}}'"""
)
LATE = (
    "http-response return status 408 content-type application/json "
    f"hdr x-request-id %[var(txn.request_id)] string {_LATE_BODY} if {{ status 408 }}"
)
# A body that no router has heard of.
LATE_AT_HAPROXY = (
    "http-error status 408 content-type application/json "
    f"hdr x-request-id %[uuid] string {_LATE_BODY}"
)
# With it, HAProxy does not see that a client leaves if head and body of its request came apart.
_SPLICED = "option splice-request"
_INDENT = "    "
_TRACKED = 100_000  # addresses at most whose connections are counted, in some 10 MB
# Between such quotes everything stands for itself.
TOO_MANY = (
    """'{"type": "error", "error": {"message": "over %d connections from this address: close """
    """some, or ask whoever runs the server for max_connections_per_address or trusted_proxy", """
    """"type": "rate_limit_error", "param": null, "code": 429}}'"""
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What Serve's text knows nothing of; numbers are of connections."""

    certificate: Path | None = None  # PEM of key and certificates; None: plain HTTP
    per_address: int = 0  # of one client's address; 0: no limit


def configured(text: str, door: FrontDoor, limits: Limits = Limits()) -> str:
    """Return what HAProxy is to be started with.

    Args:
        text: the configuration that Serve has written.
        door: what is to be different at the front door.
        limits: what this node makes of it.
    """
    lines = [
        changed
        for line, section in _sections(text)
        for changed in _changed(line, section, door, limits)
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


def _changed(line: str, section: str, door: FrontDoor, limits: Limits) -> Iterator[str]:
    """Yield what stands in place of one line."""
    words = line.split()
    if line == FRONT:
        yield line
        for rule in (NOT_REPEATED, FORWARDED, KEPT_ID, LATE, LATE_AT_HAPROXY):
            yield _INDENT + rule
        for rule in _address_rules(door, limits.per_address):
            yield _INDENT + rule
        yield f"{_INDENT}http-request wait-for-body time {door.short_body_timeout}s if METH_POST"
    elif words[:1] == ["bind"]:
        host = door.host if section == FRONT else "127.0.0.1"
        more = _tls(limits.certificate) if section == FRONT else []
        yield _INDENT + " ".join(["bind", _address(words[1], host), *words[2:], *more])
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
    _, _, port = bound.rpartition(":")
    if host is None:
        return bound
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tls(certificate: Path | None) -> list[str]:
    """Return what makes TLS of a `bind`; limits count connections, so each has a call at a time."""
    if certificate is None:
        return []
    return ["ssl", "crt", str(certificate), "ssl-min-ver", "TLSv1.2", "alpn", "http/1.1"]


def _address_rules(door: FrontDoor, per_address: int) -> Iterator[str]:
    """Yield what keeps one address from taking all connections; those of IPv6 by their network.

    A client that is a little over the limit is told so; beyond that none is read from.
    """
    if not per_address:
        return
    trusted = f" !{{ src {' '.join(door.trusted_proxy)} }}" if door.trusted_proxy else ""
    yield f"stick-table type ipv6 size {_TRACKED} expire 60s store conn_cur"
    yield "tcp-request connection track-sc0 src,ipmask(32,64)"
    most = per_address + max(1, per_address // 10)
    yield f"tcp-request connection reject if {{ sc0_conn_cur gt {most} }}{trusted}"
    yield (
        f"http-request return status 429 content-type application/json hdr Retry-After 1 "
        f"hdr Connection close string {TOO_MANY % per_address} "
        f"if {{ sc0_conn_cur gt {per_address} }}{trusted}"
    )


def _head_limit(door: FrontDoor) -> str:
    return f"timeout http-request {door.head_timeout}s"
