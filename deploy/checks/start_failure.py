"""What kept a server from coming up, in one line out of what Ray and Serve say of it.

Serve wraps what a deployment fails with in tracebacks of its own, Ray in one for each process that
it came through. The cause is the last exception that is named at the beginning of a line.
"""

import re
from collections.abc import Iterable

from deploy.config_errors import one_line

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*: (.+)$", re.MULTILINE)
_DEAD = re.compile(r"class_name: (\w+).*?pid: (\d+).*?ip: ([\w.:]+)", re.DOTALL)
_NAMES = {"WorkerActor": "a rank"}
_STATE = "the ranks are down and will be back: "


def start_failure(messages: Iterable[str]) -> str:
    """Return the cause as one line, from what Serve says of an application and its deployments."""
    said = _COLOURS.sub("", "\n".join(messages))
    causes = _EXCEPTION.findall(said)
    if not causes:
        return one_line(said) or "Serve does not say why"
    cause = str(causes[-1]).removeprefix(_STATE)
    if (dead := _DEAD.search(said)) is not None and "died unexpectedly" in cause:
        name, pid, host = dead.groups()
        process = f"the process of {_NAMES.get(name, name)} (pid {pid}, on {host})"
        return f"{process} has died; if memory was short, the kernel's log says so"
    return one_line(cause)
