"""Panels of bfloat16 in 12 bits for each weight: see coded.h, which tells the form.

Owns which weights are kept so. A product reads them from memory for a few rows, at which it waits
for memory alone; with a quarter less to read it is a quarter faster, and has the same bits.
"""

from dataclasses import replace

import torch

from kernels.linear import LinearWeight, PanelCode
from kernels.native.huge_pages import HugePages, huge_empty
from kernels.native.ops import CodingOp
from kernels.native.program import Crew, Program, Step

_GROUP_STEPS = 2
_GROUP_BYTES = 192
_NUM_CODES = 16
# A word in the list costs as much as several groups without one. Trained weights have one for 100
# groups, and some of their panels one for 10.
_GROUPS_OF_A_RARE_WORD = 8
_GROUPS_IN_ANY_PANEL = 2


def code_panels(packed: LinearWeight, crew: Crew, memory: HugePages) -> LinearWeight | None:
    """Return a weight in coded panels; None if this machine or this weight does without.

    Args:
        packed: of `pack_panels`.
        crew: whose threads code it.
        memory: where it is to lie.
    """
    assert packed.layout == "panels" and packed.code is None, "a weight is coded once, in panels"
    if packed.dtype != torch.bfloat16 or not crew.library.can_code():
        return None
    num_panels, num_steps, _ = packed.data.shape
    num_groups = -(-num_steps // _GROUP_STEPS)
    max_rare = -(-num_groups // _GROUPS_IN_ANY_PANEL)
    # Not from malloc, which would keep what is given back piece by piece between other things.
    coded = huge_empty(num_panels * num_groups * _GROUP_BYTES).view(num_panels, num_groups, -1)
    tables = torch.empty((num_panels, _NUM_CODES), dtype=torch.uint8)
    rare = torch.empty((num_panels, max_rare, 2), dtype=torch.int32)
    num_rare = torch.empty(num_panels, dtype=torch.int32)
    tensors = packed.data, coded, tables, rare, num_rare
    op = CodingOp(*(tensor.data_ptr() for tensor in tensors), num_steps, max_rare)
    program = Program()
    program.add(crew.library.op("code_panels"), op, tensors)
    crew.run(program, Step(num_panels))
    most = int(num_rare.max())
    if most > max_rare or int(num_rare.sum()) * _GROUPS_OF_A_RARE_WORD > num_panels * num_groups:
        return None
    code = PanelCode(tables, rare[:, :most].clone(), num_rare)
    if coded.nbytes + code.num_bytes >= packed.data.nbytes:
        return None
    data = memory.empty(tuple(coded.shape), torch.uint8)
    return replace(packed, data=data.copy_(coded), code=code)
