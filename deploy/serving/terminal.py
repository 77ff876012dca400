"""What a server shows on its terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from deploy.engine_config import Checked


class StepDisplay:
    """Shows one step of the start at a time, each with its own clock."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, text: str) -> None:
        """Mark the running step as finished and show another."""
        self.end()
        self._task = self._progress.add_task(text, total=1)

    def end(self) -> None:
        """Mark the running step as finished."""
        if self._task is not None:
            self._progress.update(self._task, completed=1)


@contextmanager
def show_steps(console: Console) -> Iterator[StepDisplay]:
    """Show the steps of a start until it is complete or has failed."""
    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        display = StepDisplay(progress)
        yield display
        display.end()


def show_greeting(console: Console, checked: Checked) -> None:
    """Say where the server is, what it computes on, and how to ask it."""
    config = checked.config
    console.print(f"\n[bold]Topwork serves[/] {config.base_name} at [bold]{config.local_url}[/]")
    if checked.device == "cpu":
        threads = f"{checked.threads} thread{'s' if checked.threads > 1 else ''}"
        ranks = "1 rank" if config.tp == 1 else f"{config.tp} ranks, each"
        console.print(f"It computes on the CPU: {ranks} of {threads}.")
    console.print("Ctrl-C takes it down. Try:\n")
    for name in [config.base_name, *sorted(config.adapters())[:2]]:
        body = (
            f'{{"model": "{name}", "max_tokens": 40, "temperature": 0, '
            '"messages": [{"role": "user", "content": "Tell me the capital of France."}]}'
        )
        command = (
            f"curl -s {config.local_url}/v1/chat/completions "
            f"-H 'Content-Type: application/json' -d '{body}'"
        )
        console.print(command, highlight=False, soft_wrap=True, markup=False)
        console.print()
