"""The functions of recurrent layers on a GPU, by the kernels beside this file."""

from kernels.gpu.recurrent import causal_conv as conv
from kernels.gpu.recurrent import gated_delta_rule as delta
from kernels.gpu.recurrent import gated_norm as norm
from kernels.gpu.recurrent import selective_scan as scan


class GpuRecurrent:
    """See `kernels.recurrent.interface.RecurrentKernels`."""

    causal_conv = staticmethod(conv.causal_conv)
    short_conv = staticmethod(conv.short_conv)
    selective_scan = staticmethod(scan.selective_scan)
    gated_delta_rule = staticmethod(delta.gated_delta_rule)
    gated_squares = staticmethod(norm.gated_squares)
    gated_norm = staticmethod(norm.gated_norm)
