"""Who can connect to a host that a server listens on, and how oneself does."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def from_here(host: str) -> str:
    """Return the host under which this machine reaches a server that listens on `host`."""
    return "127.0.0.1" if host == "0.0.0.0" else host
