"""The linears of a layer of Llama, by name."""

from worker.linears import by_fused, separate_linears

LINEAR_MODULES = tuple(linear.name for linear in separate_linears())
COLUMN_PARALLEL = tuple(one.name for one in separate_linears() if one.axis == "column")
FUSED_MODULES = tuple(tuple(one.name for one in group) for group in by_fused(separate_linears()))
