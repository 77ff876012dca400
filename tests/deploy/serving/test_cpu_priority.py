"""deploy.serving.cpu_priority: whom Linux lets halt others."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from deploy.serving.cpu_priority import give_way, go_first

ASK = "import os; print(os.sched_getscheduler(0))"


def in_a_thread(act: Callable[[], None]) -> None:
    """Run something whose policy must not outlive it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors


def child_policy() -> int:
    """Return the policy of a process that is started here."""
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_what_gives_way_passes_that_on_to_what_it_starts_until_one_goes_first() -> None:
    def act() -> None:
        give_way()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
        assert child_policy() == os.SCHED_BATCH

        def rank() -> None:
            assert os.sched_getscheduler(0) == os.SCHED_BATCH
            go_first()
            assert os.sched_getscheduler(0) == os.SCHED_OTHER
            in_a_thread(lambda: _is_equal(os.SCHED_OTHER))

        in_a_thread(rank)
        assert os.sched_getscheduler(0) == os.SCHED_BATCH

    in_a_thread(act)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def _is_equal(policy: int) -> None:
    assert os.sched_getscheduler(0) == policy


def test_a_sandbox_that_forbids_it_leaves_all_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    give_way()
    go_first()
