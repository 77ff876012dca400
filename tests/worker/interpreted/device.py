"""A GPU that is none: its kernels on tensors of the CPU, and graphs that do the work again."""

from torch import Tensor

from kernels.gpu.backend import GpuKernels
from tests.kernels.gpu.bounds import reachable
from tests.worker.group import Prompt, RankGroup, TinyAdapter, random_tokens
from tests.worker.models.test_decoder import make_adapter
from worker.protocol import SamplingParams
from worker.runners.gpu_runner import Work

SEEDED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11, num_logprobs=131)


class Interpreted(GpuKernels):
    """The GPU's kernels on tensors of the CPU."""

    pins_memory = False


class Graphs:
    """Makes graphs that are none: each replay does the work again, into the same tensor."""

    def __init__(self) -> None:
        self.made = 0
        self.replayed = 0

    def __call__(self, work: Work) -> Work:
        self.made += 1
        out = work()

        def replay() -> Tensor | None:
            self.replayed += 1
            again = work()
            if out is None or again is None:
                return None
            return out.copy_(again)

        return replay


def prompts_with_adapters() -> list[Prompt]:
    return [
        Prompt(random_tokens(19, 1)),
        Prompt(random_tokens(8, 2), slot=1),
        Prompt(random_tokens(5, 3), slot=0, first_step=2),
        Prompt(random_tokens(16, 4), slot=1, sampling=SEEDED, first_step=2),
    ]


def adapters_of(group: RankGroup) -> list[TinyAdapter]:
    modules = tuple(linear.name for linear in group.config.linears)
    some = tuple(name for name in modules if name.endswith(("q_proj", "v_proj", "down_proj", "w2")))
    return [
        make_adapter(group.config, seed=1, modules=modules),
        make_adapter(group.config, seed=2, modules=some, layers=(1,)),
    ]


def generate(
    group: RankGroup,
    prompts: list[Prompt],
    num_tokens: int = 3,
    chunk_size: int = 16,
    *,
    is_ahead: bool = False,
) -> list[Prompt]:
    for slot, adapter in enumerate(adapters_of(group)):
        group.load_adapter(slot, adapter)
    loaded = [one for rank in group.ranks for one in rank._bank._slots if one is not None]
    with reachable(*(tensor for one in loaded for tensor in one._plain_tensors())):
        group.generate(prompts, num_tokens, chunk_size, is_ahead=is_ahead)
    return prompts
