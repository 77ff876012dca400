"""kernels.native.program and tape: ops that one call runs on all threads of a crew."""

import threading

import pytest
import torch
from torch import Tensor

from kernels.cpu_native import NativeKernels
from kernels.native.library import Library
from kernels.native.program import Crew, Program, Step
from kernels.native.recorded_program import Tape

WIDTH = 48


def chain(kernels: NativeKernels, x: Tensor, weights: list[Tensor]) -> Tensor:
    """Return x through linears, each with a norm before it that reads what was just written."""
    residual = None
    for weight in weights:
        normed, residual = kernels.add_rms_norm(x, residual, torch.ones(WIDTH), 1e-6)
        x = kernels.linear(normed, kernels.prepare_linear(weight))
    return x


@pytest.fixture
def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(40)]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_tape_does_what_the_ops_did_one_by_one_for_any_number_of_rows(
    library: Library, weights: list[Tensor], num_threads: int
) -> None:
    crew = Crew(library, num_threads)
    kernels, tape = NativeKernels(crew), Tape(32)
    x = torch.full((32, WIDTH), torch.nan)
    with kernels.recording(tape):
        out = chain(kernels, x, weights)
    for num_rows in (1, 32, 7, 1):
        x[:num_rows] = torch.randn(num_rows, WIDTH)
        tape.run(crew, Step(num_rows))
        assert torch.equal(out[:num_rows], chain(kernels, x[:num_rows].clone(), weights))


def test_a_call_on_a_tape_comes_between_the_ops(library: Library, weights: list[Tensor]) -> None:
    crew = Crew(library, 2)
    kernels, tape = NativeKernels(crew), Tape(4)
    x = torch.randn(4, WIDTH)

    def replace(num_rows: int) -> None:
        first[:num_rows] = num_rows

    with kernels.recording(tape):
        first = chain(kernels, x, weights[:1])
        tape.call(replace)
        last = chain(kernels, first, weights[1:2])
    tape.run(crew, Step(3))
    expected = chain(kernels, torch.full((3, WIDTH), 3.0), weights[1:2])
    assert torch.equal(last[:3], expected)


def test_more_rows_than_a_tape_has_room_for_are_refused(library: Library) -> None:
    with pytest.raises(AssertionError, match="5 rows on a tape for 4"):
        Tape(4).run(Crew(library, 1), Step(5))


def test_programs_of_unequal_size_take_turns_on_one_crew(
    library: Library, weights: list[Tensor]
) -> None:
    crew = Crew(library, 3)
    kernels = NativeKernels(crew)
    x = torch.randn(9, WIDTH)
    tapes: list[tuple[Tape, Tensor, Tensor]] = []
    for count in (1, 40, 2):
        tape = Tape(9)
        with kernels.recording(tape):
            out = chain(kernels, x, weights[:count])
        tapes.append((tape, out, chain(kernels, x, weights[:count])))
    for _ in range(50):
        for tape, out, expected in tapes:
            out.fill_(torch.nan)
            tape.run(crew, Step(9))
            assert torch.equal(out, expected)


def test_an_empty_program_returns_and_leaves_the_next_alone(
    library: Library, weights: list[Tensor]
) -> None:
    crew = Crew(library, 3)
    kernels, tape = NativeKernels(crew), Tape(4)
    x = torch.randn(4, WIDTH)
    with kernels.recording(tape):
        out = chain(kernels, x, weights[:3])
    expected = chain(kernels, x, weights[:3])
    for _ in range(200):
        crew.run(Program(), Step(1))
        out.fill_(torch.nan)
        tape.run(crew, Step(4))
        assert torch.equal(out, expected)


def test_a_crew_that_nobody_needs_ends_its_threads(library: Library) -> None:
    def num_threads() -> int:
        with open("/proc/self/status") as status:
            return int(next(line for line in status if line.startswith("Threads:")).split()[1])

    before = num_threads()
    crew = Crew(library, 6)
    assert num_threads() == before + 5
    del crew
    assert num_threads() == before


def test_crews_of_several_callers_run_side_by_side(library: Library, weights: list[Tensor]) -> None:
    x = torch.randn(5, WIDTH)
    expected = chain(NativeKernels(Crew(library, 1)), x, weights)
    found: list[Tensor] = []

    def call() -> None:
        found.append(chain(NativeKernels(Crew(library, 2)), x, weights))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 3
    assert all(torch.equal(one, expected) for one in found)
