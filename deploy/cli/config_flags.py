"""One flag for every key of ServeConfig, made from the schema itself, and its other names."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from deploy.cli.aliases import POSITIONAL, CommandLine, parameter_of
from deploy.cli.output import exit_for, say_note
from deploy.config import ConfigError, ServeConfig, group_of, load_config
from deploy.flag_aliases import ALIASES, Alias, others_of

Command = Callable[..., None]  # of a ServeConfig and its own options, by their names


def with_config_flags(command: Command) -> Callable[..., None]:
    """Give a command one option for each key of ServeConfig, its aliases, MODEL and --config.

    Its own options, behind the configuration, stay.
    """
    _, *own = inspect.signature(command).parameters.values()

    def run(**flags: Any) -> None:
        options = {parameter.name: flags.pop(parameter.name) for parameter in own}
        path = flags.pop("config")
        try:
            said = CommandLine(flags)
            config = load_config(path, said.values)
            said.check_base_names(config.model, config.base_name)
            for note in said.notes:
                say_note(note)
            command(config, **options)
        except ConfigError as error:
            raise exit_for(error) from None

    fields = ServeConfig.model_fields
    signature = inspect.Signature(
        [
            _parameter(POSITIONAL, str | None, _model()),
            *(_own(key, field) for key, field in fields.items()),
            *map(_other, ALIASES),
            _parameter("config", Path | None, _file()),
            *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        ]
    )
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=annotation)


def _model() -> Any:
    return typer.Argument(None, metavar="MODEL", help="The same as --model.", show_default=False)


def _file() -> Any:
    return typer.Option(None, help="YAML file with the same keys; flags win over it.")


def _own(key: str, field: FieldInfo) -> inspect.Parameter:
    others = others_of(key)
    also = f" Also {', '.join(others)}." if others else ""
    option = typer.Option(None, help=f"{field.description}{also}", rich_help_panel=group_of(key))
    return _parameter(key, _flag_type(field), option)


def _flag_type(field: FieldInfo) -> Any:
    """Return the type that the command line reads; the schema checks the value itself."""
    members = [t for t in get_args(field.annotation) or (field.annotation,) if t is not type(None)]
    if get_origin(field.annotation) is tuple:
        return list[str] | None
    if members == [bool]:
        return bool | None
    return str | None


def _other(alias: Alias) -> inspect.Parameter:
    """Return the parameter of an alias, which no help shows: docs/flags.md lists them."""
    name = f"{alias.name}/{alias.negation}" if alias.negation is not None else alias.name
    annotation: Any = bool | None
    if alias.takes_value:
        annotation = list[str] | None if alias.takes_many else str | None
    return _parameter(parameter_of(alias), annotation, typer.Option(None, name, hidden=True))
