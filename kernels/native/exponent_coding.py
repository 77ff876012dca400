"""Panels of bfloat16 in 12 bits for each weight: their form is in
csrc/linear/exponent_coding.h.

A product of a few rows waits for memory alone: with a quarter less to read it is a quarter faster,
and has the same bits.
"""

from dataclasses import replace

import torch

from kernels.linear import ExponentCode, LinearWeight
from kernels.native.huge_pages import HugePages, huge_empty
from kernels.native.ops import CodingOp
from kernels.native.program import Program, Step, ThreadPool

_GROUP_STEPS = 2
_GROUP_BYTES = 192
_NUM_CODES = 16
# A word in the list costs as much as several groups without one. Trained weights have one for 100
# groups, and some of their panels one for 10.
_GROUPS_OF_AN_OUTLIER = 8
_GROUPS_IN_ANY_PANEL = 2


def encode_panels(
    packed: LinearWeight, thread_pool: ThreadPool, memory: HugePages
) -> LinearWeight | None:
    """Return a weight in coded panels; None if this weight does without.

    Args:
        packed: of `pack_panels`.
        thread_pool: whose threads code it.
        memory: where it is to lie.
    """
    assert packed.layout == "panels" and packed.code is None, "a weight is coded once, in panels"
    if packed.dtype != torch.bfloat16:
        return None
    num_panels, num_steps, _ = packed.data.shape
    num_groups = -(-num_steps // _GROUP_STEPS)
    max_outliers = -(-num_groups // _GROUPS_IN_ANY_PANEL)
    # Not from malloc, which would keep what is given back piece by piece between other things.
    coded = huge_empty(num_panels * num_groups * _GROUP_BYTES).view(num_panels, num_groups, -1)
    tables = torch.empty((num_panels, _NUM_CODES), dtype=torch.uint8)
    outliers = torch.empty((num_panels, max_outliers, 2), dtype=torch.int32)
    num_outliers = torch.empty(num_panels, dtype=torch.int32)
    tensors = packed.data, coded, tables, outliers, num_outliers
    op = CodingOp(*(tensor.data_ptr() for tensor in tensors), num_steps, max_outliers)
    program = Program()
    program.add(thread_pool.library.op("encode_panels"), op, tensors)
    thread_pool.run(program, Step(num_panels))
    most = int(num_outliers.max())
    if (
        most > max_outliers
        or int(num_outliers.sum()) * _GROUPS_OF_AN_OUTLIER > num_panels * num_groups
    ):
        return None
    code = ExponentCode(tables, outliers[:, :most].clone(), num_outliers)
    if coded.nbytes + code.num_bytes >= packed.data.nbytes:
        return None
    data = memory.empty(tuple(coded.shape), torch.uint8)
    return replace(packed, data=data.copy_(coded), code=code)
