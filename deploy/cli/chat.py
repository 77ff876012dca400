"""`topwork chat`: a conversation with a running server."""

import sys
from typing import Annotated

import typer

from deploy.cli.connection import DEFAULT_URL, Key, Url, connected


def chat(
    model: Annotated[
        str | None, typer.Option(help="Model or adapter; default: the base model.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 is greedy; default: the server's.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Talk to a model or an adapter of a running server; /help lists what else can be typed.

    Ctrl-C stops an answer, Ctrl-D ends. Without a terminal each line of standard input is a turn,
    only answers are printed, and the first call that fails ends it with 2.
    """
    from deploy.cli.conversation import Conversation, Settings
    from deploy.cli.prompt import answer_all

    settings = Settings(model, system, max_tokens, temperature)
    with connected(url, api_key) as client:
        answer_all(Conversation(client, settings), is_terminal=sys.stdin.isatty())
