"""What is going on while a server starts, one step at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class StepShower:
    """Shows one start-up step at a time, each with its own clock."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: Any = None

    def __call__(self, text: str) -> None:
        self.done()
        self._task = self._progress.add_task(text, total=1)

    def done(self) -> None:
        """Mark the running step as finished."""
        if self._task is not None:
            self._progress.update(self._task, completed=1)


@contextmanager
def steps(console: Console) -> Iterator[StepShower]:
    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        shower = StepShower(progress)
        yield shower
        shower.done()
