"""deploy.serving.process_setup: which threads interrupt others, and who finds CPUs of Ray's."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from deploy.config import ServeConfig
from deploy.serving.pool.deployment import pool_deployment
from deploy.serving.process_setup import lower_cpu_priority, restore_cpu_priority
from deploy.serving.router.deployment import router_deployment
from deploy.serving.scheduler_deployment import scheduler_deployment

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


def test_a_lowered_cpu_priority_is_inherited_until_it_is_restored() -> None:
    def act() -> None:
        lower_cpu_priority()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
        assert child_policy() == os.SCHED_BATCH

        def rank() -> None:
            assert os.sched_getscheduler(0) == os.SCHED_BATCH
            restore_cpu_priority()
            assert os.sched_getscheduler(0) == os.SCHED_OTHER
            in_a_thread(lambda: _is_equal(os.SCHED_OTHER))

        in_a_thread(rank)
        assert os.sched_getscheduler(0) == os.SCHED_BATCH

    in_a_thread(act)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def _is_equal(policy: int) -> None:
    assert os.sched_getscheduler(0) == policy


@pytest.mark.parametrize("before", [0, 3, 15])
def test_all_threads_of_a_process_that_yields_its_cores_are_nicer_than_before(before: int) -> None:
    program = f"""
import os, threading
from deploy.serving.process_setup import NICENESS, yield_cores
own = os.nice({before})
may_end = threading.Event()
threading.Thread(target=may_end.wait).start()
yield_cores()
threading.Thread(target=may_end.wait).start()  # one that is started later, too
nice = [os.getpriority(os.PRIO_PROCESS, int(tid)) for tid in os.listdir("/proc/self/task")]
may_end.set()
assert len(nice) >= 3 and set(nice) == {{min(19, own + NICENESS)}}, (own, nice)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_sandbox_that_forbids_it_leaves_all_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    lower_cpu_priority()
    restore_cpu_priority()


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_adapter_pool_finds_room_on_any_node_that_the_others_fill(tp: int) -> None:
    config = ServeConfig.model_validate({"model": "tiny", "device": "cpu", "tp": tp})
    bundles = scheduler_deployment(config)._replica_config.placement_group_bundles
    assert bundles is not None and len(bundles) == 1 + tp
    takes = [bundle["CPU"] for bundle in bundles]
    takes.append((router_deployment(config).ray_actor_options or {})["num_cpus"])
    pool = (pool_deployment(config).ray_actor_options or {})["num_cpus"]
    assert pool > 0, "a head without CPUs could be given the pool"
    for cores in range(1, len(takes) + 1):
        assert round(sum(takes[:cores]) + pool, 4) <= cores


def test_what_our_loggers_say_reaches_standard_error_where_serve_has_taken_sys_stderr_away() -> (
    None
):
    script = (
        "import io, logging, sys; from deploy.serving.process_setup import set_log_level; "
        "from cluster.router.tenancy.audit_log import AuditEntry; "
        "sys.stderr = io.StringIO(); set_log_level('WARNING'); "
        "logging.getLogger('topwork.router').error('heard'); "
        "logging.getLogger('topwork.router').info('dropped'); "
        "AuditEntry(action='drain', router='r', request_id='job-7').ended(200)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    first, second = done.stderr.splitlines()
    assert first.startswith("ERROR") and first.endswith("topwork.router: heard")
    assert second.startswith("INFO") and '"action":"drain"' in second


def test_no_message_and_no_traceback_of_our_loggers_can_forge_a_line() -> None:
    script = (
        "import logging; from deploy.serving.process_setup import set_log_level\n"
        "set_log_level('INFO'); logger = logging.getLogger('topwork.pool')\n"
        "logger.info('a\\nERROR forged \\x1b[2J %s', '\\x9b')\n"
        "try:\n"
        "    raise ValueError('b\\nERROR forged')\n"
        "except ValueError:\n"
        "    logger.exception('c')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    first, second, *rest = done.stderr.splitlines()
    assert first.endswith("topwork.pool: a\\x0aERROR forged \\x1b[2J \\x9b")
    assert second.startswith("ERROR") and second.endswith("topwork.pool: c")
    assert len(rest) > 2 and all(line.startswith("  ") for line in rest)
