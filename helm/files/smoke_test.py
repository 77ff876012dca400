"""`helm test`: waits until requests are served, and asks for a completion if it may.

Says what it found, ends with 0 or 1. Needs nothing but Python's own library and the environment
TOPWORK_URL, TOPWORK_SECONDS and, to ask, TOPWORK_API_KEY or TOPWORK_ANONYMOUS.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request


def ask(path: str, body: object = None) -> tuple[int, str]:
    """Return status and text of an answer; 0 without an answer."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("TOPWORK_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(os.environ["TOPWORK_URL"] + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def wait_until_ready(seconds: float) -> str:
    """Return what the server says last: nothing once it is ready."""
    deadline = time.monotonic() + seconds
    while True:
        status, text = ask("/ready")
        if status == 200:
            return ""
        if time.monotonic() > deadline:
            return f"/ready: {status} {text}"
        time.sleep(1)


def complete() -> str:
    """Return what is wrong with a completion of the first model, or nothing."""
    status, text = ask("/v1/models")
    if status != 200:
        return f"/v1/models: {status} {text}"
    model = json.loads(text)["data"][0]["id"]
    status, text = ask("/v1/completions", {"model": model, "prompt": "One", "max_tokens": 1})
    return "" if status == 200 else f"/v1/completions: {status} {text}"


def main() -> int:
    """Print what was found and return the exit status."""
    fault = wait_until_ready(float(os.environ["TOPWORK_SECONDS"]))
    if not fault and {"TOPWORK_API_KEY", "TOPWORK_ANONYMOUS"} & set(os.environ):
        fault = complete()
    print(fault or "requests are served")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
