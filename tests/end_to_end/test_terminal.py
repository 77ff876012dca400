"""What a person sees of `topwork serve` in a terminal, from its start to Ctrl-C."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.processes import title
from tests.end_to_end.server import adapter_dirs
from tests.end_to_end.terminal import ServerInTerminal

pytestmark = [pytest.mark.model, pytest.mark.ray]

ALARMING = re.compile(r"died|dead|kill|error|fail|traceback|exception|warn", re.IGNORECASE)


def expected_screen(port: int) -> list[str]:
    """Return the lines of a server that came up; times and numbers of threads are N."""
    url = f"http://127.0.0.1:{port}"
    lines = [
        "✓ starting the Ray cluster       N",
        "✓ loading the model into 2 ranks N",
        "",
        f"Topwork serves smollm2 at {url}",
        "It computes on the CPU: 2 ranks, each of N.",
        "Ctrl-C takes it down. Try:",
    ]
    for name in ("smollm2", *list(adapter_dirs())[:2]):
        body = (
            f'{{"model": "{name}", "max_tokens": 40, "temperature": 0, '
            '"messages": [{"role": "user", "content": "Tell me the capital of France."}]}'
        )
        call = f"{url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
        lines += ["", f"curl -s {call}"]
    return lines


def without_numbers(lines: list[str]) -> list[str]:
    return [re.sub(r"\d:\d\d:\d\d$|\d+ threads?(?=\.$)", "N", line) for line in lines]


def test_from_start_to_ctrl_c_a_terminal_shows_what_is_meant_and_nothing_that_alarms(
    last_shown: ServerInTerminal,
) -> None:
    terminal, expected = last_shown.terminal, expected_screen(last_shown.port)
    wait_for(lambda: len(terminal.screen()) >= len(expected), lambda: terminal.written)
    assert without_numbers(terminal.screen()) == expected
    processes = {pid: title(pid) for pid in last_shown.processes()}
    assert len(processes) > 10, "Ray, Serve, HAProxy and the ranks"
    terminal.press_ctrl_c()
    assert terminal.wait() == 0
    left = {pid: name for pid, name in processes.items() if Path(f"/proc/{pid}").exists()}
    assert not left, "processes left over"
    assert "taking everything down" in terminal.written
    assert without_numbers(terminal.screen()) == expected
    assert not ALARMING.findall(terminal.written)
