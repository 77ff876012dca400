"""Numbers that are sent to a GPU: what arrives, and where in memory."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.async_copy import ALIGNMENT, send_columns

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
