"""All commands of `topwork`, and what it says without one."""

from importlib.metadata import version
from typing import Annotated

import typer

from deploy.cli import adapters, serve, tools
from deploy.cli.chat import chat
from deploy.cli.flag_command import FlagCommand
from deploy.cli.status import status

SERVING, RUNNING, TOOLS = "Serving", "A server that runs", "Tools"

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"topwork {version('topwork')}")
        raise typer.Exit


@app.callback()
def _topwork(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serve one base model and many LoRA adapters of it."""


for _name, _command, _panel in (
    ("serve", serve.serve, SERVING),
    ("check", serve.check, SERVING),
    ("environment", serve.environment, SERVING),
    ("certificates", tools.certificates, SERVING),
    ("config-schema", serve.config_schema, SERVING),
    ("chat", chat, RUNNING),
    ("status", status, RUNNING),
    ("bench", tools.bench, TOOLS),
    ("replay", tools.replay, TOOLS),
    ("demo-model", tools.demo_model, TOOLS),
):
    app.command(_name, cls=FlagCommand, rich_help_panel=_panel)(_command)
app.add_typer(adapters.app, name="adapters", rich_help_panel=RUNNING)
