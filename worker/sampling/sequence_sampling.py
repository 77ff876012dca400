"""What a sequence's sampling parameters come to: found once, when it starts, for all its steps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.sampling import GREEDY_BELOW, RowSampling

if TYPE_CHECKING:
    from worker.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceSampling:
    """How the tokens of one sequence are sampled."""

    params: "SamplingParams"
    draw: RowSampling  # how to sample from a row once it is adjusted
    needs_history: bool  # as `params` says
    always_restricts: bool  # whether some tokens can at no place be drawn
    always_adjusts: bool  # whether logits are changed at every place before a token is drawn
    may_adjust: bool  # whether they are at any
    takes_largest: bool  # whether the token is the largest logit, where it is not adjusted
    is_guided: bool  # whether the tokens before say which may come, or which must
    num_logprobs: int | None  # as `params` says
    is_pooled: bool  # whether the prompt's states are wanted in place of tokens

    @classmethod
    def of(cls, params: "SamplingParams") -> "SequenceSampling":
        """Return what some parameters come to."""
        draw = RowSampling(
            params.temperature, params.top_k, params.top_p, params.min_p, params.seed
        )
        restricts = bool(params.grammar or params.bad_words or params.allowed_tokens)
        adjusts = restricts or bool(params.logit_bias) or params.has_penalties
        holds_back = params.min_tokens > 0 and bool(params.held_back)
        return cls(
            params,
            draw,
            needs_history=params.needs_history,
            always_restricts=restricts,
            always_adjusts=adjusts,
            may_adjust=adjusts or holds_back or params.thinking is not None,
            takes_largest=params.temperature < GREEDY_BELOW and params.num_logprobs is None,
            is_guided=bool(params.grammar) or params.thinking is not None,
            num_logprobs=params.num_logprobs,
            is_pooled=bool(params.pooling),
        )

    def restricts(self, output_index: int) -> bool:
        """Whether some tokens cannot be drawn as the output's token of this number, from 0 on."""
        params = self.params
        if self.always_restricts:
            return True
        if params.thinking is not None and output_index >= params.thinking.num_tokens:
            return True
        return output_index < params.min_tokens and bool(params.held_back)

    def adjusts(self, output_index: int) -> bool:
        """Whether logits are changed before the output's token of this number is drawn."""
        return self.always_adjusts or self.restricts(output_index)
