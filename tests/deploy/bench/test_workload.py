"""Everyone who is measured is asked the same, and percentiles are what they say."""

from deploy.bench.workload import Run, Sample, Workload, percentile


def make(**changes: object) -> Workload:
    values: dict[str, object] = {
        "name": "w",
        "models": ("base", "a"),
        "concurrency": 2,
        "num_requests": 6,
        "input_len": 20,
        "output_len": 3,
        **changes,
    }
    return Workload(**values)  # type: ignore[arg-type]


def test_a_round_is_the_same_for_everyone_and_unlike_the_next() -> None:
    assert make().asks(1) == make().asks(1)
    assert not {a.token_ids for a in make().asks(1)} & {a.token_ids for a in make().asks(2)}


def test_models_are_asked_in_turn_with_prompts_of_the_wanted_length() -> None:
    asks = make().asks(1)
    assert [ask.model for ask in asks] == ["base", "a"] * 3
    assert {len(ask.token_ids) for ask in asks} == {20}


def test_a_shared_prefix_is_shared_by_one_model_only() -> None:
    asks = make(shared_prefix_len=16).asks(1)
    prefixes = {
        model: {a.token_ids[:16] for a in asks if a.model == model} for model in ("base", "a")
    }
    assert len(prefixes["base"]) == len(prefixes["a"]) == 1
    assert prefixes["base"] != prefixes["a"]
    assert len({ask.token_ids for ask in asks}) == 6


def test_a_run_counts_tokens_over_the_time_from_first_send_to_last_token() -> None:
    run = Run((Sample(10.0, (11.0, 12.0, 14.0)), Sample(10.5, (12.0, 12.5, 13.0))))
    assert run.tokens_per_second == 6 / 4
    assert run.first_token(50) == 1.5
    assert run.inter_token(99) == 2.0


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 50) == 3.0
    assert percentile([1.0], 99) == 1.0
