"""A command that says which flag was probably meant, and reads flags as vLLM's users write them.

That is: `_` for `-`, and several values after a flag that argparse lets take many.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from typer.core import TyperCommand

from deploy.cli.output import exit_for
from deploy.config_errors import ConfigError, one_line
from deploy.flag_aliases import BY_NAME


class FlagCommand(TyperCommand):
    """Goes through the flags before typer does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the command line apart, as typer does."""
        if not ctx.resilient_parsing:  # a shell does not want to hear of mistakes
            try:
                args = self._spelled_out(ctx, args)
            except ConfigError as error:
                raise exit_for(error) from None
        return super().parse_args(ctx, args)

    def _spelled_out(self, ctx: Any, args: Sequence[str]) -> list[str]:
        """Return the arguments as typer reads them.

        Raises:
            ConfigError: if there is a flag that the command does not have.
        """
        flags = {
            name: parameter
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }
        spelled: list[str] = []
        left = list(reversed(args))
        while left:
            arg = left.pop()
            if arg == "--":
                return [*spelled, arg, *reversed(left)]
            if not arg.startswith("-") or arg == "-":
                spelled.append(arg)
                continue
            name, equals, value = arg.partition("=")
            name = name.replace("_", "-")
            if name not in flags:
                raise ConfigError(_unknown(name, flags))
            spelled.append(f"{name}{equals}{value}")
            if equals or getattr(flags[name], "is_flag", False):
                continue
            if left:
                spelled.append(left.pop())
            takes_many = name in BY_NAME and BY_NAME[name].takes_many
            while takes_many and left and not left[-1].startswith("-"):
                spelled += [name, left.pop()]
        return spelled


def _unknown(name: str, flags: dict[str, Any]) -> str:
    served = [flag for flag in flags if flag not in BY_NAME or not BY_NAME[flag].is_refused]
    close = get_close_matches(name, served, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else "; --help lists all"
    return f"{one_line(name)}: there is no such flag{hint}"
