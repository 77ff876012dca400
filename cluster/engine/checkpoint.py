"""Writes the state of a scheduler at the end of a file of events: `... OLDER STATE`.

Run as a process of its own by a recording, at the lowest priority: it replays OLDER, from
OLDER.state where that begins in the middle of a scheduler's life.
"""

import os
import sys
from pathlib import Path

from cluster.engine.recording import state_path
from cluster.scheduler.replay.event_log import (
    Checkpoint,
    LogError,
    decode_checkpoint,
    decode_record,
    encode_checkpoint,
    read_frames,
)
from cluster.scheduler.replay.replayer import Replay

NICENESS = 19


def read_state(path: Path) -> Checkpoint | None:
    """Return the state at the beginning of a file of events, None if none is kept.

    Raises:
        OSError: if it cannot be read.
        LogError: if it is something else, or damaged.
    """
    state = state_path(path)
    return decode_checkpoint(state.read_bytes()) if state.exists() else None


def checkpoint(path: Path) -> Checkpoint:
    """Replay a whole file and return the state at its end.

    Raises:
        OSError: if it cannot be read.
        LogError: if it cannot be replayed, or not to the same plans.
    """
    replay = Replay()
    replay.begin_file(read_state(path))
    with path.open("rb") as stream:
        for offset, payload in read_frames(stream):
            replay.apply(decode_record(payload, offset), offset)
            if replay.difference is not None:
                raise LogError(offset, f"the replay differs: {replay.difference}")
    found = replay.checkpoint()
    if found is None:
        raise LogError(0, "there are no events")
    return found


def main() -> None:
    """Write the state at the end of the first argument to the second."""
    os.nice(NICENESS)
    older, target = (Path(argument) for argument in sys.argv[1:])
    try:
        data = encode_checkpoint(checkpoint(older))
        part = target.with_name(target.name + ".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # holds prompts
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(part, target)
        except OSError:
            part.unlink()
            raise
    except (OSError, LogError) as error:
        sys.exit(f"topwork: no state of {older}: {error}")


if __name__ == "__main__":
    main()
