"""Steps are given the time that steps like them took, many times over."""

from cluster.engine.step_limit import FACTOR, GROWTH, LEAST, MAX_PATIENCE, STEADY_STEPS, StepLimit


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


def test_a_step_that_stood_still_once_gives_those_behind_it_little_more() -> None:
    """Else a hang after it would be one for as long as seven such steps."""
    limit = StepLimit(8.0)
    limit.measured(1, 0.1)
    limit.measured(1, 2.0)
    assert limit.of(1) == FACTOR * (GROWTH * 0.1)


def test_steps_that_go_on_growing_have_their_time() -> None:
    """As those of a long context behind short ones do."""
    limit, seconds = StepLimit(8.0), 0.1
    for _ in range(6):
        limit.measured(1, seconds)
        seconds *= GROWTH
        assert limit.of(1) > seconds


def test_ranks_after_late_ones_have_twice_the_time_each_time_up_to_a_bound() -> None:
    patience, limits = 1, []
    for _ in range(5):
        limit = StepLimit(8.0, patience=patience)
        limit.measured(1, 0.01)
        limits.append((limit.of(512), limit.of(1)))
        patience = limit.patience_after(was_exceeded=True)
    times = [1, 2, 4, MAX_PATIENCE, MAX_PATIENCE]
    assert limits == [(8.0 * n, LEAST * n) for n in times]


def test_ranks_that_are_lost_otherwise_leave_the_patience_as_it_is() -> None:
    assert StepLimit(8.0).patience_after(was_exceeded=False) == 1
    assert StepLimit(8.0, patience=4).patience_after(was_exceeded=False) == 4


def test_after_some_steps_in_time_the_limit_is_as_strict_as_ever() -> None:
    limit = StepLimit(8.0, patience=4)
    for _ in range(STEADY_STEPS - 1):
        limit.measured(1, 0.01)
    assert limit.of(1) == 4 * LEAST
    limit.measured(1, 0.01)
    assert limit.of(1) == LEAST
    assert limit.patience_after(was_exceeded=True) == 2
