"""Numbers that are sent to a GPU: what arrives, and where in memory."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.async_copy import ALIGNMENT, send_columns, send_in_pieces

TYPES = st.sampled_from((np.int32, np.int64, np.float32))


@given(st.lists(st.tuples(TYPES, st.integers(0, 9)), min_size=1, max_size=8))
def test_columns_arrive_as_they_were_each_where_kernels_may_load_it_at_its_widest(
    shapes: list[tuple[type[np.generic], int]],
) -> None:
    columns = [(np.arange(count) * 3 - 7).astype(dtype) for dtype, count in shapes]
    sent = send_columns(columns, torch.device("cpu"))
    assert len(sent) == len(columns)
    for there, column in zip(sent, columns, strict=True):
        assert there.numpy().dtype == column.dtype
        assert np.array_equal(there.numpy(), column)
    bases = {there.data_ptr() % ALIGNMENT for there in sent if there.numel()}
    assert len(bases) <= 1, "as far from a multiple as the first"


@pytest.mark.parametrize("num_elements", [0, 1, 7, 8, 9, 100])
def test_a_tensor_arrives_whole_and_no_piece_of_it_is_larger_than_one_may_be(
    num_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.gpu.async_copy._PIECE", 16)  # bytes
    sizes: list[int] = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.copy_.default:
                sizes.append(args[0].nbytes)
            return func(*args, **(kwargs or {}))

    host = torch.arange(num_elements, dtype=torch.int16)
    with Watched():
        there = send_in_pieces(host, torch.device("cpu"))
    assert torch.equal(there, host) and there.data_ptr() != host.data_ptr() or not num_elements
    assert sum(sizes) == host.nbytes and max(sizes, default=0) <= 16
