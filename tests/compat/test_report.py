"""Which of vLLM's cases count, and what is counted of them."""

import json
from pathlib import Path

import pytest

from tests.compat import report as reports
from tests.compat.report import read, shown
from tests.compat.source import with_facts
from tests.compat.vllm_cases import MODEL_NAME, reason_of

FILE = "tests/entrypoints/openai/chat_completion/test_chat.py"


def written(path: Path, *cases: tuple[str, str, bool]) -> Path:
    lines = [
        {"case": name, "outcome": outcome, "server": server, "message": "because"}
        for name, outcome, server in cases
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_needs_vllm_or_asks_no_server_does_not_count_and_the_last_end_of_a_case_does(
    tmp_path: Path,
) -> None:
    found = read(
        written(
            tmp_path / "report",
            ("a::one", "failed", True),
            ("a::one", "passed", True),
            ("a::two", "failed", True),
            ("a::three", "internals", True),
            ("a::four", "passed", False),
            ("tests/entrypoints/openai/decisions/test_x.py::five", "passed", True),
        )
    )
    assert (found.passed, found.failed) == (["a::one"], {"a::two": "because"})
    assert (found.counted, found.share) == (2, 0.5)
    assert sorted(found.not_counted.values()) == [1, 1, 1]
    assert found.unexplained() == ["a::two"]
    assert "1 of 2 pass: 50.0%" in shown(found)


def test_a_case_that_fails_on_purpose_is_explained_and_one_that_passes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "difference_of", lambda case: "so" if "two" in case else "")
    found = read(written(tmp_path / "report", ("a::two", "failed", True)))
    assert (found.unexplained(), found.stale()) == ([], [])
    found = read(written(tmp_path / "report", ("a::two", "passed", True)))
    assert found.stale() == ["a::two"]


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        (f"{FILE}::test_zero_logprobs_chat[x]", True),
        (f"{FILE}::test_response_format_json_object", False),
        ("tests/tool_use/test_chat_completions.py::test_a[hermes]", True),
        ("tests/tool_use/test_chat_completions.py::test_a[llama3.2]", False),
        ("tests/entrypoints/pooling/embed/test_online_vision.py", False),
    ],
)
def test_a_case_counts_unless_its_reading_says_why_not(case: str, counts: bool) -> None:
    assert bool(reason_of(case)) != counts


def test_the_demo_model_takes_the_place_of_others_and_what_is_not_found_is_told() -> None:
    text = 'MODEL = "Qwen/Qwen3-0.6B"\nassert tokens == 5\n'
    facts = {FILE: {"== 5": "== 6"}}
    assert with_facts(FILE, text, facts) == f'MODEL = "{MODEL_NAME}"\nassert tokens == 6\n'
    with pytest.raises(SystemExit, match="does not have"):
        with_facts(FILE, "", facts)
