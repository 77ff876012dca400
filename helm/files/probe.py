"""Whether a pod may live: `probe.py MODE PORT`, exit status 0 or 1 with a reason.

Owns what an answer means: a raylet that does not answer is dead; that no proxy runs here is
no fault of the ranks; ranks without progress answer 503 on /health. How long a fault may last is
the probe's. Needs nothing but Python's own library.

Modes: `proxy` (Serve answers here), `ranks` (no rank is stuck), `server` (one-node: /health is 200
or the server still starts).
"""

import http.client
import sys

RAYLET_PORT = 52365
TIMEOUT = 4.0  # seconds; the probe itself has more


def status(port: int, path: str) -> int | None:
    """Return the status of an answer, or None without one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def fault(mode: str, port: int, raylet_port: int = RAYLET_PORT) -> str:
    """Return what is wrong, or nothing."""
    if mode != "server" and status(raylet_port, "/api/healthz") != 200:
        return "the raylet does not answer"
    if mode == "proxy":
        return "" if status(port, "/-/healthz") is not None else "Serve does not answer"
    health = status(port, "/health")
    if mode == "server" and health is None:
        return "the server does not answer"
    return "the ranks make no progress" if health == 503 else ""


def main(arguments: list[str]) -> int:
    """Print what is wrong and return the exit status."""
    mode, port = arguments
    reason = fault(mode, int(port))
    if reason:
        print(reason)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
