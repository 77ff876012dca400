"""`topwork replay`: applies recorded events again and says whether all comes out the same.

Owns the files, the progress and the report; `cluster.scheduler.replay.replayer` compares.
"""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.engine.checkpoint import read_state
from cluster.scheduler.replay.event_log import LogError, TornLog, decode_record, read_frames
from cluster.scheduler.replay.replayer import Replay

SAME, DIFFERENT, NO_LOG = 0, 1, 2  # exit codes
STRIDE_BYTES = 256 * 1024  # between two looks at the progress


def replay_files(paths: Sequence[Path], console: Console) -> int:
    """Replay files in order and report; return the exit code."""
    replay = Replay()
    for path in paths:
        try:
            note = _replay_file(replay, path, console)
        except (OSError, LogError) as error:
            console.print(f"[bold red]error[/] {path}: {error}", highlight=False, soft_wrap=True)
            _print_counts(replay, console)
            return NO_LOG
        if note:
            console.print(f"[yellow]note[/] {path}: {note}", highlight=False, soft_wrap=True)
        if replay.difference is not None:
            console.print(
                f"[bold red]different[/] {path}: {replay.difference}",
                highlight=False,
                soft_wrap=True,
            )
            _print_counts(replay, console)
            return DIFFERENT
    _print_counts(replay, console)
    if replay.counts.events == 0:
        console.print("[bold red]error[/] there are no events to replay")
        return NO_LOG
    console.print(f"all plans are the same; the chain ends in {replay.chain}", highlight=False)
    return SAME


def _replay_file(replay: Replay, path: Path, console: Console) -> str:
    """Replay one file up to its first difference; return what is odd about it, if anything is.

    Raises:
        LogError: if it is no log, or only the beginning of it is one.
    """
    replay.begin_file(read_state(path))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with path.open("rb") as stream, bar as progress:
        task = progress.add_task(path.name, total=path.stat().st_size)
        shown = 0
        try:
            for offset, payload in read_frames(stream):
                replay.apply(decode_record(payload, offset), offset)
                if replay.difference is not None:
                    return ""
                if offset >= shown + STRIDE_BYTES:
                    shown = offset
                    progress.update(task, completed=offset)
        except TornLog as torn:
            return str(torn)
    return ""


def _print_counts(replay: Replay, console: Console) -> None:
    counts = replay.counts
    recorded = "" if replay.version is None else f"; recorded by topwork {replay.version}"
    console.print(
        f"{counts.events} events, {counts.steps} steps, {counts.requests} requests, "
        f"schedulers: {counts.schedulers}{recorded}, replayed by {version('topwork')}",
        highlight=False,
        soft_wrap=True,
    )
