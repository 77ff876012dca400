"""Steps are given the time that steps like them took, many times over."""

from cluster.engine.step_limit import FACTOR, LEAST, StepLimit


def test_what_was_never_measured_has_the_flat_limit() -> None:
    limit = StepLimit(8.0)
    limit.measured(4, 0.01)
    assert limit.of(512) == 8.0


def test_a_decode_has_little_time_after_decodes_and_a_long_prompt_its_own() -> None:
    limit = StepLimit(8.0)
    limit.measured(512, 2.0)
    assert limit.of(8) == FACTOR * 2.0, "nothing smaller was measured"
    limit.measured(8, 0.02)
    assert limit.of(8) == LEAST
    assert limit.of(300) == FACTOR * 2.0


def test_one_slow_step_is_forgotten_after_many() -> None:
    limit = StepLimit(8.0)
    limit.measured(1, 10.0)
    for _ in range(400):
        limit.measured(1, 0.1)
    assert limit.of(1) == LEAST
