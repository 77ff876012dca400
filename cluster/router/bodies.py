"""What all JSON bodies from outside have in common: strictness, and the parameters of others.

A parameter that would change the answer and is not supported is refused by name; one that asks for
nothing is accepted. Knows nothing of any call's own fields.
"""

from pydantic import BaseModel, ConfigDict, JsonValue

from cluster.errors import InvalidRequest

# Said of the call or of the caller, not of the answer.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "store",
        "user",
    }
)

# Parameters that other servers know, with the values beside null that ask for nothing.
NEUTRAL_VALUES: dict[str, tuple[JsonValue, ...]] = {
    "added_tokens_config": ({},),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),  # of chats; completions have it
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "http_worker_ipc": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_id": (),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}


class Body(BaseModel):
    """A JSON object from outside: exact types, finite numbers."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    def refuse_extras(self, where: str = "") -> None:
        """Check that all that is not a field asks for nothing.

        Raises:
            InvalidRequest: naming the first parameter, by name, that is not supported.
        """
        for name, value in sorted((self.model_extra or {}).items()):
            if name in HARMLESS or (name in NEUTRAL_VALUES and value is None):
                continue
            if _is_neutral(value, NEUTRAL_VALUES.get(name, ())):
                continue
            known = "is not supported" if name in NEUTRAL_VALUES else "is not a known parameter"
            raise InvalidRequest(
                f"{where}{name[:100]} {known}", where + name[:100], "unsupported_parameter"
            )


def _is_neutral(value: JsonValue, neutral: tuple[JsonValue, ...]) -> bool:
    # True == 1 in Python, and best_of=true is not best_of=1
    return any(value == other and type(value) is type(other) for other in neutral)
