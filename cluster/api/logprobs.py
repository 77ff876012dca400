"""Log-probabilities in OpenAI's two shapes.

Knows nothing of how they came about.
"""

from collections.abc import Sequence

from cluster.api.schemas.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from cluster.router.output_processor import TokenLogprob
from cluster.router.tokenizer import Tokenizer

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Return the shape of /v1/chat/completions."""

    def alternative(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            tokenizer.token_text(token_id),
            max(logprob, FLOOR),
            list(tokenizer.token_bytes(token_id)),
        )

    content = []
    for entry in entries:
        own = alternative(entry.token_id, entry.logprob)
        top = [alternative(token_id, logprob) for token_id, logprob in entry.top]
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offset: int
) -> tuple[CompletionLogprobs, int]:
    """Return the shape of /v1/completions, and the offset after its tokens.

    Offsets count the tokens' own texts, so that they stay in step with `tokens`.
    """
    shape = CompletionLogprobs([], [], [], [])
    for entry in entries:
        text = tokenizer.token_text(entry.token_id)
        shape.text_offset.append(offset)
        shape.token_logprobs.append(max(entry.logprob, FLOOR))
        shape.tokens.append(text)
        best = ((entry.token_id, entry.logprob), *entry.top)
        shape.top_logprobs.append(
            {tokenizer.token_text(token_id): max(logprob, FLOOR) for token_id, logprob in best}
        )
        offset += len(text)
    return shape, offset
