"""A process whose event loop stands still is killed; one that beats, or cannot, is left alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.serving.lifecycle.watchdog import MOST_CHANCES, Delays, is_stopped, run_delays, watch
from tests.end_to_end.asking import wait_for
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[4]
PROGRAM = """
import asyncio, signal, sys, time
from deploy.serving.lifecycle.watchdog import Watchdog

# A shell that starts the tests in the background has SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

async def main():
    watchdog = Watchdog(2.0)
    watchdog.start()
    print(watchdog._child.pid, flush=True)
    await asyncio.sleep(float(sys.argv[1]))
    time.sleep(float(sys.argv[2]))
    watchdog.stop()
    print("ended", flush=True)

asyncio.run(main())
"""


def started(beats: float, hangs: float) -> tuple[subprocess.Popen[str], int]:
    """Start a process that beats and then hangs for so many seconds; return it and its watchdog."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(beats), str(hangs)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_one_that_beats_goes_on_and_its_watchdog_ends_with_it() -> None:
    process, watchdog = started(beats=2.5, hangs=0.0)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (0, "ended\n", "")
    wait_for(lambda: is_gone(watchdog))


def test_one_whose_loop_hangs_is_killed() -> None:
    process, watchdog = started(beats=0.5, hangs=PATIENCE)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    assert "has stood still for 2 s and is killed" in err
    assert "in main" in err, "where it stood"
    wait_for(lambda: is_gone(watchdog))


def test_one_that_is_stopped_is_killed() -> None:
    process, _ = started(beats=PATIENCE, hangs=0.0)
    assert not is_stopped(process.pid)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_stopped(process.pid))
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    assert "has stood still for 2 s and is killed" in err


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_watchdog_ends_with_a_process_that_is_killed(how: signal.Signals) -> None:
    process, watchdog = started(beats=PATIENCE, hangs=0.0)
    process.send_signal(how)
    process.communicate(timeout=PATIENCE)
    wait_for(lambda: is_gone(watchdog))


def test_one_that_stood_still_with_the_whole_machine_is_left_alone() -> None:
    process, watchdog = started(beats=3.0, hangs=0.0)
    for pid in (watchdog, process.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.8)  # longer than until the last chance
    for pid in (watchdog, process.pid):
        os.kill(pid, signal.SIGCONT)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "ended\n")


@pytest.mark.parametrize(
    ("starved", "is_killed"),
    [
        pytest.param(2, False, id="for a while"),
        pytest.param(0, True, id="not at all"),
        pytest.param(MOST_CHANCES, True, id="for ever"),
    ],
)
def test_one_that_gets_no_cpu_is_given_more_chances(starved: int, is_killed: bool) -> None:
    """A beat comes behind the second chance in which it waited for a CPU, or never."""
    beats, beating = os.pipe()
    chances = 0

    def delays(_: int) -> Delays:
        nonlocal chances
        chances += 1
        if chances == 2 * starved + 1 and not is_killed:
            os.write(beating, b".")
            os.close(beating)
        return {"1": min((chances // 2), starved) * 10**8, "2": 10**12}

    assert watch(1, 0.04, beats, delays) is is_killed
    assert chances == {2: 5, 0: 2, MOST_CHANCES: 2 * MOST_CHANCES}[starved]
    os.close(beats)
    if is_killed:
        os.close(beating)


def test_a_thread_that_shares_its_cpu_with_another_has_waited_for_it() -> None:
    core = min(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    spinners = [
        subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for one in spinners:
            assert one.stdout is not None
            one.stdout.readline()
        first, second = (run_delays(one.pid) for one in spinners)
        wait_for(
            lambda: all(
                max(run_delays(one.pid).values()) - max(before.values()) > 10**8
                for one, before in zip(spinners, (first, second), strict=True)
            )
        )
    finally:
        for one in spinners:
            one.kill()
            one.communicate()
