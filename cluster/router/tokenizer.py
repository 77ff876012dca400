"""Text to tokens and back, and conversations to text.

Owns the model's tokenizer and chat template. Loads the fast tokenizer class itself, not
AutoTokenizer, because that imports torch, which a router does not need.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from tokenizers.decoders import ByteLevel

from cluster.errors import InvalidRequest

# What a template may raise on a conversation it was not written for: its own raise_exception, a
# missing key, a filter on the wrong type. The template is the model's, the conversation is not.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no whole character

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def _byte_by_character() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


class _OwnTexts(dict[int, str | None]):
    """Texts of single tokens, each decoded when it is first asked for."""

    def __init__(self, decode: Callable[[list[int]], str] | None) -> None:
        super().__init__()
        self._decode = decode  # None: what a token says depends on its neighbours

    def __missing__(self, token_id: int) -> str | None:
        text = None if self._decode is None else self._decode([token_id])
        self[token_id] = None if text is not None and REPLACEMENT in text else text
        return self[token_id]


class Tokenizer:
    """The tokenizer of one model directory; safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer  # encodes and decodes without shared state
        self._byte_by_character = _byte_by_character()
        # This decoder, and no other, strings the bytes of tokens together and does nothing else.
        is_bytewise = isinstance(self._backend.decoder, ByteLevel)
        self._own_texts = {
            skips: _OwnTexts(
                partial(self.decode, skip_special_tokens=skips) if is_bytewise else None
            )
            for skips in (False, True)
        }
        vocabulary = tokenizer.get_vocab()
        self.num_tokens = len(tokenizer)
        self.longest_token = max(len(token) for token in vocabulary)  # characters

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read tokenizer.json and the chat template of a model directory.

        Raises:
            OSError: if the directory has no fast tokenizer.
        """
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{path} has no tokenizer.json")
        # Here, because it takes a third of a second that only a router need spend, not the process
        # that starts it.
        from transformers import PreTrainedTokenizerFast

        return cls(PreTrainedTokenizerFast.from_pretrained(str(path)))

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the tokens of a text."""
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of tokens, as a whole."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def own_texts(self, skip_special_tokens: bool) -> Mapping[int, str | None]:
        """Return the text of each token that says the same between any others, None for others."""
        return self._own_texts[skip_special_tokens]

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
    ) -> str:
        """Return a conversation as the model was trained to read it.

        Raises:
            InvalidRequest: if the model has no chat template, or the template refuses.
        """
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        for name in variables:
            if name in RESERVED_VARIABLES:
                raise InvalidRequest(
                    f"chat_template_kwargs: {name!r} cannot be set", "chat_template_kwargs"
                )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"the chat template refuses: {error}", "messages") from error
        return text

    def token_text(self, token_id: int) -> str:
        """Return one token's own text; U+FFFD where it is part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's bytes, also where they are part of a character."""
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        token: str = self._backend.id_to_token(token_id)
        if token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:-1])
        if all(character in self._byte_by_character for character in token):
            return bytes(self._byte_by_character[character] for character in token)
        return text.encode()
