"""What an answer may not say, as tokens: `bad_words` and `allowed_token_ids`.

Owns how words become tokens, and what of it leaves nothing to say. The sampler keeps to it:
`worker.sampling.forbidden_tokens`.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from cluster.api.schemas.requests import GenerationBody
from cluster.errors import InvalidRequest
from cluster.router.config import RouterConfig
from cluster.router.tokenizer import Tokenizer
from worker.protocol import SamplingParams

TOKENS_AT_ONCE = 16_384  # that are looked at between two turns of other threads
MAX_CHARACTERS = 4096  # of all bad words: they are tokenized while streams wait


def restricted(
    sampling: SamplingParams,
    body: GenerationBody,
    tokenizer: Tokenizer,
    config: RouterConfig,
    grammar_param: str,
) -> SamplingParams:
    """Return how tokens are drawn, without those that a body does not want.

    Args:
        sampling: how they are drawn otherwise.
        body: what was asked.
        tokenizer: of the model.
        config: of the router.
        grammar_param: what asks for a form of the answer; "": nothing.

    Raises:
        InvalidRequest: for words and tokens that are none, or if nothing would be left to draw.
    """
    for name, value in (
        ("bad_words", body.bad_words),
        ("allowed_token_ids", body.allowed_token_ids),
    ):
        if value and grammar_param:
            reason = f"with {grammar_param}, the form of the answer says which tokens may come"
            raise InvalidRequest(f"{name}: {reason}", name)
    words = tuple(sorted(set(_tokens_of(body.bad_words or (), tokenizer))))
    for word in words:
        check_token_ids(word, config, "bad_words")
    banned = {word[0] for word in words if len(word) == 1}
    if len(banned) >= config.vocab_size:
        raise InvalidRequest("bad_words: they leave no token to draw", "bad_words")
    bits = b""
    if body.allowed_token_ids is not None:
        allowed = _allowed(body.allowed_token_ids, config)
        if allowed <= banned:
            raise InvalidRequest("bad_words: they leave nothing of allowed_token_ids", "bad_words")
        bits = _bits(allowed)
    return msgspec.structs.replace(sampling, bad_words=words, allowed_tokens=bits)


def naming(
    sampling: SamplingParams, token_ids: Sequence[int], config: RouterConfig
) -> SamplingParams:
    """Return how tokens are drawn, with log-probabilities of these in place of the likeliest.

    Raises:
        InvalidRequest: if tokens are not in the vocabulary.
    """
    check_token_ids(token_ids, config, "logprob_token_ids")
    named = tuple(dict.fromkeys(token_ids))
    return msgspec.structs.replace(sampling, num_logprobs=0, logprob_token_ids=named)


def check_token_ids(token_ids: Sequence[int], config: RouterConfig, param: str) -> None:
    """Raise InvalidRequest unless all tokens are in the vocabulary."""
    for begin in range(0, len(token_ids), TOKENS_AT_ONCE):
        some = token_ids[begin : begin + TOKENS_AT_ONCE]
        for token_id in (min(some), max(some)):
            if not 0 <= token_id < config.vocab_size:
                raise InvalidRequest(
                    f"{param}: token {token_id} is out of vocabulary, which has "
                    f"{config.vocab_size} tokens",
                    param,
                )


def _tokens_of(words: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each word as a text may begin with it, and behind a space."""
    if sum(map(len, words)) > MAX_CHARACTERS:
        raise InvalidRequest(f"bad_words: over {MAX_CHARACTERS} characters together", "bad_words")
    for word in words:
        bare = word.lstrip(" ") or word
        variants = [tokenizer.encode(text, False) for text in (bare, f" {bare}")]
        if not (bare and variants[0]):
            raise InvalidRequest(f"bad_words: {word!r} has no tokens", "bad_words")
        yield from variants


def _allowed(token_ids: Sequence[int], config: RouterConfig) -> set[int]:
    if len(token_ids) > config.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids: {len(token_ids)} are more than the {config.vocab_size} tokens of "
            "the vocabulary",
            "allowed_token_ids",
        )
    check_token_ids(token_ids, config, "allowed_token_ids")
    return set(token_ids)


def _bits(token_ids: set[int]) -> bytes:
    """Return a bit for each token up to the last, the lowest id in the lowest bit."""
    flags = np.zeros(max(token_ids) + 1, dtype=np.bool_)
    flags[list(token_ids)] = True
    return np.packbits(flags, bitorder="little").tobytes()
