"""Which server a command talks to, and with which key."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from deploy.cli.output import exit_for

if TYPE_CHECKING:
    from deploy.cli.client import Client

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option(help="Where the server is.", rich_help_panel="Server")]
Key = Annotated[
    str | None,
    typer.Option(
        envvar="TOPWORK_API_KEY",
        show_envvar=True,
        help="API key; better in the environment, for everyone here sees command lines.",
        rich_help_panel="Server",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="JSON, as without a terminal.", rich_help_panel="Server")
]


@contextmanager
def connected(url: str, api_key: str | None) -> Iterator["Client"]:
    """Yield a client; say what the server says, and end with 2, where a call fails."""
    from deploy.cli.client import CallError, Client

    try:
        with Client(url, api_key) as client:
            yield client
    except CallError as error:
        raise exit_for(error) from None


def path_of(*parts: str) -> str:
    """Return a path whose parts may hold anything."""
    return "".join(f"/{quote(part, safe='')}" for part in parts)
