"""The command line as a whole: help, version, completion, and what it costs to ask for them."""

import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from deploy.cli.commands import app
from deploy.config import GROUPS, ServeConfig
from tests.deploy.cli.command_line import topwork
from tests.patience import PATIENCE

COMMANDS = {
    *("serve", "check", "environment", "certificates", "config-schema"),
    *("chat", "status", "adapters"),
    *("bench", "replay", "demo-model"),
}


def shell(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "COLUMNS": "100", **more},
        check=False,
    )


def test_every_key_is_in_one_group() -> None:
    assert list(ServeConfig.model_fields) == [k for g in GROUPS.values() for k in g.model_fields]


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_shows_the_flags_in_their_groups_and_no_alias_as_a_flag(command: str) -> None:
    said = topwork(command, "--help", COLUMNS="160", TERMINAL_WIDTH="160").stdout
    titles = re.findall(r"^╭─ (.+?) ─", said, re.MULTILINE)
    assert [title for title in titles if title in GROUPS] == list(GROUPS)
    shown = re.findall(r"^│ (--[a-z-]+)", said, re.MULTILINE)
    assert {f"--{key.replace('_', '-')}" for key in ServeConfig.model_fields} < set(shown)
    assert not {"--tensor-parallel-size", "--mem-fraction-static"} & set(shown)
    assert "Also --tensor-parallel-size, -tp, --tp-size." in " ".join(said.split())


def test_every_command_is_there_and_the_help_names_it() -> None:
    assert set(get_command(app).commands) == COMMANDS  # type: ignore[attr-defined]
    said = topwork("--help").stdout
    assert all(re.search(rf"^│ {command} ", said, re.MULTILINE) for command in COMMANDS)


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    said = shell("--version")
    assert (said.returncode, said.stdout) == (0, f"topwork {version('topwork')}\n")


def test_signals_are_taken_before_anything_else_is_imported() -> None:
    code = (
        "import signal, sys; sys.argv[1:] = ['serve']; import deploy.cli; "
        "assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None); "
        "assert not {'typer', 'pydantic', 'rich', 'deploy.config'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_asking_for_help_imports_nothing_heavy() -> None:
    heavy = ("ray", "torch", "transformers", "httpx", "fastapi", "prometheus_client", "numpy")
    code = (
        "import sys; from deploy.cli.commands import app; app(['serve', '--help'], "
        f"standalone_mode=False); assert not {set(heavy)} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, capture_output=True)


@pytest.mark.parametrize(
    ("name", "ends_with"),
    [
        ("bash", "complete -o default -F _topwork_completion topwork"),
        ("zsh", "compdef _topwork_completion topwork"),
    ],
)
def test_a_script_that_completes_is_printed_for_each_shell(name: str, ends_with: str) -> None:
    said = shell(_TOPWORK_COMPLETE=f"source_{name}")
    assert said.returncode == 0
    assert said.stdout.strip().endswith(ends_with)
    assert f"_TOPWORK_COMPLETE=complete_{name}" in said.stdout
    asked = shell("--show-completion", name, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert asked.stdout.strip() == said.stdout.strip()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("topwork ch", {"chat", "check"}),
        ("topwork adapters un", {"unload", "unpin"}),
        ("topwork serve --max-l", {"--max-loras", "--max-lora-rank"}),
    ],
)
def test_words_are_completed(words: str, completed: set[str]) -> None:
    count = len(words.split()) - 1
    said = shell(_TOPWORK_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count))
    assert set(said.stdout.split()) == completed


def test_a_command_that_is_misspelled_is_answered_with_the_nearest() -> None:
    assert "Did you mean 'check'?" in topwork("chek").stderr
    assert "Did you mean 'list'?" in topwork("adapters", "lst").stderr
    assert "did you mean --inplace?" in topwork("adapters", "load", "a", "b", "--in-place").stderr
