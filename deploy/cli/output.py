"""What commands say: mistakes and notes on standard error, results as a table or as JSON."""

import json
import sys

import typer
from rich.console import Console
from rich.markup import escape

console = Console(stderr=True)


def say_error(text: str) -> None:
    """Say on standard error what is wrong."""
    console.print(f"[bold red]error[/] {escape(text)}", highlight=False, soft_wrap=True)


def say_note(text: str) -> None:
    """Say on standard error what is worth knowing and is not wrong."""
    console.print(f"[bold]note[/] {escape(text)}", highlight=False, soft_wrap=True)


def exit_for(error: Exception) -> typer.Exit:
    """Say what is wrong, and return what ends the command."""
    say_error(str(error))
    return typer.Exit(2)


def wants_json(asked: bool) -> bool:
    """Return whether a result is to be JSON: if it was asked for, or if no person reads it."""
    return asked or not sys.stdout.isatty()


def print_json(value: object) -> None:
    """Print a result as JSON."""
    print(json.dumps(value, indent=2))
