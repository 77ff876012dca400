"""From where the keys of an issuer may be fetched: over TLS, or on this machine."""

import ipaddress
from urllib.parse import urlsplit


def check_oidc(issuer: str, jwks: str | None) -> None:
    """Check where keys are to be fetched from.

    Raises:
        ValueError: with the reason, if that would not be safe, or is no address.
    """
    check_url(issuer)
    if jwks is not None and "://" in jwks:
        check_url(jwks)


def check_url(url: str) -> None:
    """Check that what is fetched is what the host of a URL has sent; raises as `check_oidc`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{url[:256]!r} is no URL: {error}") from None
    if not host or port == 0 or not url.isprintable() or " " in url:
        raise ValueError(f"{url[:256]!r} is no URL")
    if parts.username is not None or parts.fragment or parts.query:
        raise ValueError(f"{url[:256]!r}: a URL without user, query and fragment is wanted")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_this_machine(host)):
        raise ValueError(
            f"{url[:256]!r}: https is wanted, for whoever is between could forge tokens otherwise"
        )


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
