"""What the benchmark of two tenants asks, and how its figures are judged."""

import pytest

from tests.bench.tenants.__main__ import goals
from tests.bench.tenants.backlog import Backlog
from tests.bench.tenants.phases import ALONE, WARM, Phase
from tests.bench.tenants.serving import Metrics
from tests.bench.tenants.weights import Shared


def backlog(name: str) -> Backlog:
    return Backlog(
        name=name, url="", key="", models=("a", "b"), clients=1, input_len=32, output_len=4,
        vocab_size=1000,
    )  # fmt: skip


def test_models_are_asked_in_turn_and_no_prompt_twice() -> None:
    asks = [backlog(name).ask(number) for name in ("warm", "full") for number in range(50)]
    assert [ask.model for ask in asks[:3]] == ["a", "b", "a"]
    assert len({ask.token_ids for ask in asks}) == len(asks)
    assert {len(ask.token_ids) for ask in asks} == {32}


def test_goals_are_over_the_first_phase() -> None:
    alone, warm = Phase(ALONE, [[0.1] * 99 + [0.2]]), Phase(WARM, [[0.12] * 99 + [0.5]])
    found = {goal.name: goal for goal in goals([alone, warm], [])}
    p50, p99 = found.values()
    assert (p50.measured, p99.measured) == (pytest.approx(1.2), pytest.approx(2.5))
    assert p50.is_met and not p99.is_met


def test_the_error_of_a_share_is_a_part_of_the_share() -> None:
    assert Shared((1, 3), (260.0, 740.0)).error == pytest.approx(0.04)
    (goal,) = goals([], [Shared((1, 1), (400.0, 600.0))])
    assert not goal.is_met and goal.measured == pytest.approx(0.2)


def test_metrics_are_summed_over_labels() -> None:
    metrics = Metrics(
        'topwork_tenant_generation_tokens_total{router="a",tenant="small"} 3\n'
        'topwork_tenant_generation_tokens_total{router="b",tenant="small"} 4\n'
        'topwork_tenant_generation_tokens_total{router="b",tenant="large"} 50\n'
        "topwork_kv_blocks 100\ntopwork_kv_blocks_held 95\n"
    )
    assert (metrics.generated("small"), metrics.generated("large")) == (7, 50)
    assert metrics.is_full
