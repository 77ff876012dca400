"""Files over https, from hosts that an operator has named.

No redirect is followed, no proxy and no credential is used, and what a name resolves to is looked
at before it is connected to: the addresses where clouds keep a machine's own credentials are never
asked. Blocks, so call it in a thread.
"""

import ipaddress
import socket
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore

from cluster.adapters.peft.strict_json import shown
from cluster.adapters.sources.allow_list import PARAM, Address
from cluster.errors import InvalidRequest, NotFound, TopworkError, Unavailable

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
RETRY_SECONDS = 5
# Where clouds answer beside 169.254.0.0/16: AWS over IPv6, Azure, Alibaba.
_METADATA = frozenset(
    ipaddress.ip_address(one) for one in ("fd00:ec2::254", "168.63.129.16", "100.100.100.200")
)
_TIMEOUT = {
    "connect": CONNECT_SECONDS,
    "read": READ_SECONDS,
    "write": CONNECT_SECONDS,
    "pool": CONNECT_SECONDS,
}


class _Refused(Exception):
    """A host that resolves to what is never asked."""


class CheckedBackend(httpcore.SyncBackend):
    """Connects to the address that was looked at, whatever the name resolves to a moment later."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to a host, or refuse to."""
        try:
            found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(f"{host} is not known: {error}") from error
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        for address in addresses:
            if is_forbidden(address):
                raise _Refused(f"{host} resolves to {address}, which is never asked")
        return super().connect_tcp(addresses[0], port, timeout, local_address, socket_options)


def is_forbidden(address: str) -> bool:
    """Tell whether an IP address is link-local, a cloud's metadata or none of one machine."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or ip
    return ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip in _METADATA


@contextmanager
def open_web(address: Address, name: str) -> Iterator[Iterator[bytes]]:
    """Hold a file of a folder open; its bytes come as they are sent.

    Raises:
        NotFound: if there is no such file.
        InvalidRequest: if the host refuses, redirects or may not be asked.
        Unavailable: if it does not answer.
    """
    url = f"{address}/{name}"
    context = ssl.create_default_context()
    try:
        with (
            httpcore.ConnectionPool(ssl_context=context, network_backend=CheckedBackend()) as pool,
            pool.stream(
                "GET",
                url,
                headers={"Accept-Encoding": "identity", "Host": address.parts[0]},
                extensions={"timeout": _TIMEOUT},
            ) as response,
        ):
            _check(response, url)
            yield response.iter_stream()
    except _Refused as error:
        raise InvalidRequest(str(error), PARAM) from error
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
        raise Unavailable(
            f"{shown(url)} cannot be fetched: {type(error).__name__}: {shown(str(error))}",
            PARAM,
            retry_after=RETRY_SECONDS,
        ) from error


def _check(response: httpcore.Response, url: str) -> None:
    headers = {key.lower(): value for key, value in response.headers}
    if response.status != 200:
        raise _error_of(response.status, headers.get(b"location", b""), url)
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise InvalidRequest(f"{shown(url)} came encoded, which was not asked for", PARAM)


def _error_of(status: int, location: bytes, url: str) -> TopworkError:
    if status in (404, 410):
        return NotFound(f"there is no {shown(url)}", PARAM)
    if 300 <= status < 400:
        return InvalidRequest(
            f"{shown(url)} redirects to {shown(location.decode('latin-1'))}, which is not "
            "followed: name the place itself",
            PARAM,
        )
    message = f"{shown(url)} was answered with {status}"
    if status == 429 or status >= 500:
        return Unavailable(message, PARAM, retry_after=RETRY_SECONDS)
    return InvalidRequest(message, PARAM)
