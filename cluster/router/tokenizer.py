"""Text to tokens and back, and conversations to text.

Owns the model's tokenizer and chat template. Loads the fast tokenizer class itself, not
AutoTokenizer, because that imports torch, which a router does not need.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jinja2
from tokenizers.decoders import ByteLevel

from cluster.errors import InvalidRequest
from worker.model_files import TOKENIZER, TOKENIZER_FILES, has_file, read_file

# What a template may raise on a conversation it was not written for: its own raise_exception, a
# missing key, a filter on the wrong type. The template is the model's, the conversation is not.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no whole character

_SOME_MESSAGES = [{"role": "user", "content": "a"}]
_SOME_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
LARGEST_INT = 2**63
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token

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
    """The tokenizer of one model; safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer  # encodes and decodes without shared state
        self._byte_by_character = _byte_by_character()
        # This decoder, and no other, strings the bytes of tokens together and does nothing else.
        self._is_bytewise = isinstance(self._backend.decoder, ByteLevel)
        self._own_texts: dict[tuple[bool, Sequence[int]], _OwnTexts] = {}
        added = self._backend.get_added_tokens_decoder().items()
        self._special_ids = frozenset(number for number, token in added if token.special)
        self._added_ids = {token.content: number for number, token in added}
        vocabulary = tokenizer.get_vocab()
        self.num_tokens = len(tokenizer)
        self.longest_token = max(len(token) for token in vocabulary)  # characters

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read tokenizer.json and the chat template of a model, a directory or a GGUF file.

        Raises:
            OSError: if it has no fast tokenizer.
            ValueError: if what a GGUF file says of one is not supported; names the key.
        """
        if not has_file(path, TOKENIZER):
            raise FileNotFoundError(f"{path} has no {TOKENIZER}")
        # Here, because it takes a third of a second that only a router need spend, not the process
        # that starts it.
        from transformers import PreTrainedTokenizerFast

        if path.is_dir():
            return cls(PreTrainedTokenizerFast.from_pretrained(str(path)))
        with TemporaryDirectory() as folder:  # for the library reads no other thing
            for name in TOKENIZER_FILES:
                if has_file(path, name):
                    (Path(folder) / name).write_bytes(read_file(path, name))
            return cls(PreTrainedTokenizerFast.from_pretrained(folder))

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._tokenizer.chat_template)

    def info(self) -> dict[str, Any]:
        """Return what tokenizer_config.json says, with its keys, of what is in use."""
        info: dict[str, Any] = {"tokenizer_class": type(self._tokenizer).__name__}
        info |= self._tokenizer.special_tokens_map
        if self._tokenizer.model_max_length < LARGEST_INT:  # else it is said nowhere
            info["model_max_length"] = self._tokenizer.model_max_length
        info["chat_template"] = self._tokenizer.chat_template
        info["added_tokens_decoder"] = {
            str(token_id): {"content": token.content} | {key: getattr(token, key) for key in FLAGS}
            for token_id, token in sorted(self._tokenizer.added_tokens_decoder.items())
        }
        return info

    def encode(
        self, text: str, add_special_tokens: bool, pair: str | None = None
    ) -> tuple[int, ...]:
        """Return the tokens of a text, or of two as the tokenizer puts them together."""
        encoding = self._backend.encode(text, pair, add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def encode_aside(
        self, text: str, add_special_tokens: bool, pair: str | None = None
    ) -> tuple[int, ...]:
        """Return what `encode` does; for long texts, in a thread that keeps no other one waiting.

        A batch, even of one, lets go of the interpreter while it is tokenized.
        """
        given = text if pair is None else (text, pair)
        (encoding,) = self._backend.encode_batch_fast(
            [given], add_special_tokens=add_special_tokens
        )
        return tuple(encoding.ids)

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool, shown: Sequence[int] = ()
    ) -> str:
        """Return the text of tokens, as a whole; with the special ones of `shown` in any case."""
        if skip_special_tokens and shown:
            hidden = self._special_ids.difference(shown)
            token_ids = [token_id for token_id in token_ids if token_id not in hidden]
            skip_special_tokens = False
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_aside(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return what `decode` does; as `encode_aside`."""
        texts: list[str] = self._backend.decode_batch([token_ids], skip_special_tokens)
        return texts[0]

    def own_texts(
        self, skip_special_tokens: bool, shown: Sequence[int] = ()
    ) -> Mapping[int, str | None]:
        """Return the text of each token that says the same between any others, None for others."""
        key = (skip_special_tokens, tuple(shown))
        if key not in self._own_texts:
            decode = partial(self.decode, skip_special_tokens=skip_special_tokens, shown=key[1])
            self._own_texts[key] = _OwnTexts(decode if self._is_bytewise else None)
        return self._own_texts[key]

    def added_tokens(self, texts: Sequence[str]) -> dict[str, int]:
        """Return which of these texts are tokens of their own, whatever is beside them."""
        return {text: self._added_ids[text] for text in texts if text in self._added_ids}

    @cached_property
    def chat_template(self) -> str:
        """The source of the chat template, of all of them if there are several."""
        template = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    @property
    def score_template(self) -> str | None:
        """The source of the chat template named score: of a query and a document, in this order."""
        template = self._tokenizer.chat_template
        return template.get("score") if isinstance(template, dict) else None

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the chat template tells the model of tools: a conversation with one differs."""
        if not self.has_chat_template:
            return False
        texts = []
        for tools in (None, _SOME_TOOLS):
            try:
                texts.append(self.render(_SOME_MESSAGES, True, False, {}, tools))
            except InvalidRequest:  # it wants a conversation of another kind
                return "tools" in self.chat_template
        return texts[0] != texts[1]

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        *,
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """Return a conversation as the model was trained to read it.

        Args:
            messages: the turns.
            add_generation_prompt: whether the assistant's turn is begun.
            continue_final_message: whether the last turn is left open.
            variables: that the template gets by their names.
            tools: that the model is told of.
            documents: that the template may show to the model.
            chat_template: in place of the model's own.

        Raises:
            InvalidRequest: if the model has no chat template, or the template refuses.
        """
        if chat_template is None and not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        for name in variables:
            if name in RESERVED_VARIABLES:
                raise InvalidRequest(
                    f"chat_template_kwargs: {name!r} cannot be set", "chat_template_kwargs"
                )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                documents=documents,
                chat_template=chat_template,
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

    def raw_token(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; nothing for an id that no token has."""
        return self._backend.id_to_token(token_id) or ""

    def raw_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return what `raw_token` does of each."""
        return [self.raw_token(token_id) for token_id in token_ids]

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
