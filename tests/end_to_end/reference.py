"""transformers + peft in fp32: says of every token whether it is the one that must come."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.end_to_end.server import MODEL_DIR, adapter_dirs

# What bfloat16 does to the gap between the best two logits of the demo model, over 680 positions
# of its answers. The C functions, which round weights and inputs alone, are off by 0.052 (rms), by
# 0.18 at one position in a hundred, by 0.28 at most. Torch, which rounds every product too, is off
# by 0.093, 0.30 and 0.86, in AMX by 0.093, 0.33 and 0.61. A tie is what five times rms can turn.
TIE_IN_BFLOAT16 = 0.25
TIE_IN_BFLOAT16_BY_TORCH = 0.47


@dataclass(frozen=True)
class Judged:
    """What the reference says of an answer, whose last token decides nothing."""

    answer: list[int]  # without the last
    best: torch.Tensor  # [tokens, 2] logits
    index: torch.Tensor  # [tokens, 2] whose they are


class Reference:
    """A model, optionally with adapters, that judges greedy answers."""

    def __init__(self, model_dir: Path, adapters: dict[str, Path]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        for index, (name, directory) in enumerate(sorted(adapters.items())):
            if index == 0:
                model = PeftModel.from_pretrained(model, str(directory), adapter_name=name)
            else:
                model.load_adapter(str(directory), adapter_name=name)
        self._model = model.eval()
        self._has_adapters = bool(adapters)
        self._judged: dict[tuple[str | None, tuple[int, ...]], list[Judged]] = {}

    @torch.inference_mode()
    def logits(self, adapter: str | None, token_ids: list[int]) -> torch.Tensor:
        ids = torch.tensor([token_ids])
        if not self._has_adapters:
            return self._model(ids).logits[0]
        if adapter is None:
            with self._model.disable_adapter():
                return self._model(ids).logits[0]
        self._model.set_adapter(adapter)
        return self._model(ids).logits[0]

    def wrong_tokens(
        self,
        adapter: str | None,
        prompt: list[int],
        answer: list[int],
        dtype: str,
        tie: float = TIE_IN_BFLOAT16,
    ) -> list[tuple[int, int, int, float]]:
        """Return (position, ours, right, top-2 logit gap) of the tokens that are wrong.

        In bfloat16 the answer counts up to the first position whose gap is under `tie`: there both
        tokens are right, and what follows depends on the choice. In float32 every position counts
        whose gap is over 0.001, each judged after our own tokens before it.
        """
        best, index = self._best(adapter, prompt, answer)
        wrong = []
        for i, ours in enumerate(answer):
            gap = float(best[i, 0] - best[i, 1])
            if dtype == "bfloat16" and gap < tie:
                break
            if ours != int(index[i, 0]) and gap > 0.001:
                wrong.append((i, ours, int(index[i, 0]), gap))
        return wrong

    def _best(
        self, adapter: str | None, prompt: list[int], answer: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best two logits for each token of an answer, and whose they are."""
        before = answer[:-1]
        judged = self._judged.setdefault((adapter, tuple(prompt)), [])
        for one in judged:  # most answers come again at the next size or over HTTP
            if one.answer[: len(before)] == before:
                return one.best, one.index
        logits = self.logits(adapter, prompt + before)[len(prompt) - 1 :]
        judged.append(Judged(before, *logits.topk(2)))
        return judged[-1].best, judged[-1].index


@cache
def demo_reference() -> Reference:
    """Return the demo model with all demo adapters."""
    return Reference(MODEL_DIR, adapter_dirs())


@cache
def demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


QUESTIONS = (
    "Tell me the capital of France.",
    "Name three colours of the rainbow.",
    "How many legs does a spider have?",
    "Write a short sentence about the sea.",
    "What do bees make?",
    "Who wrote Romeo and Juliet?",
    "What is 2 + 2?",
    "Which planet is the largest?",
)


def chat_prompt(text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    ids = demo_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return [int(i) for i in ids]
