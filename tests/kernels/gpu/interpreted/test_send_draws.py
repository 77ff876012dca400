"""How rows are drawn is on the device as it was asked for, be it sent anew or there already."""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.backend import GpuKernels
from kernels.sampling import RowSampling

CPU = torch.device("cpu")
DRAWS = [
    RowSampling(temperature, top_k, top_p, 0.1, seed)
    for temperature, (top_k, top_p, seed) in product(
        (0.5, 1.0), ((0, 1.0, 3), (20, 0.9, 2**64 - 1))
    )
]
STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(DRAWS)), min_size=1, max_size=3),
    min_size=2,
    max_size=6,
)


@given(STEPS)
def test_every_step_has_its_own_draws(steps: list[list[tuple[int, RowSampling]]]) -> None:
    kernels = GpuKernels(deterministic=False)
    for number, step in enumerate(steps):
        rows, draws = [row for row, _ in step], [draw for _, draw in step]
        positions = [number + row for row in rows]
        sent = kernels.send_draws(rows, draws, positions, CPU)
        fresh = GpuKernels(deterministic=False).send_draws(rows, draws, positions, CPU)
        assert torch.equal(sent.rows, fresh.rows)
        assert (sent.draws, sent.positions) == (draws, positions)
        for own, expected in zip(sent.columns, fresh.columns, strict=True):
            assert torch.equal(own, expected) and own.dtype == expected.dtype


def test_of_the_same_draws_only_the_positions_are_sent(monkeypatch) -> None:
    kernels, sent = GpuKernels(deterministic=False), []

    def send(columns, device):  # type: ignore[no-untyped-def]
        sent.append(len(columns))
        return [torch.from_numpy(column.copy()) for column in columns]

    monkeypatch.setattr("kernels.gpu.sampling.draws.send_columns", send)
    for positions in ([4, 9], [5, 10], [6, 11]):
        kernels.send_draws([0, 1], DRAWS[:2], positions, CPU)
    kernels.send_draws([0, 1], DRAWS[1:3], [7, 12], CPU)
    assert sent == [7, 1, 1, 7]
