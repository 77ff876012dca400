"""What a command line comes to, without a server: `read` gives the configuration."""

from dataclasses import dataclass
from functools import cache

import typer
import typer.testing
from typer.testing import CliRunner, Result

from deploy.cli.commands import app
from deploy.cli.config_flags import with_config_flags
from deploy.cli.flag_command import FlagCommand
from deploy.config import ServeConfig

# Made from the signature anew at each call else, which takes 0.1 s for 250 flags.
typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Read:
    """A configuration that was read, and what was said beside it."""

    config: ServeConfig
    said: str


def read(*arguments: str) -> Read:
    """Return what `topwork serve` would serve."""
    told, configs = run(*arguments)
    assert (told.exit_code, told.stdout) == (0, ""), told.output
    return Read(configs[0], told.stderr)


def refused(*arguments: str) -> str:
    """Return what is said of a command line that is refused, a mistake in each line."""
    told, configs = run(*arguments)
    assert (told.exit_code, told.stdout, configs) == (2, "", []), told.output
    assert told.stderr.startswith("error ")
    return told.stderr.removeprefix("error ").rstrip("\n")


def topwork(*arguments: str, **more: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, arguments, env=more)


def run(*arguments: str) -> tuple[Result, list[ServeConfig]]:
    """Return what `topwork serve` says, and the configurations that it would serve."""
    one, configs = _serve()
    configs.clear()
    return CliRunner().invoke(one, arguments), list(configs)


@cache
def _serve() -> tuple[typer.Typer, list[ServeConfig]]:
    """Return the command, and what it puts its configurations into."""
    configs: list[ServeConfig] = []

    def command(config: ServeConfig) -> None:
        configs.append(config)

    one = typer.Typer(pretty_exceptions_enable=False)
    one.command(cls=FlagCommand)(with_config_flags(command))
    return one, configs
