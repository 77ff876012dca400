"""What requests mean: defaults, and how answers are read."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deploy.config_values import parse_object
from deploy.keys.base import Keys


class RequestKeys(Keys):
    """Keys that `--help` shows under Requests."""

    generation_config: Annotated[
        str,
        Field(
            description="Where defaults of sampling come from: auto, the model's "
            "generation_config.json; vllm, none; or a directory or file."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any],
        BeforeValidator(parse_object),
        Field(description='Defaults of sampling before those, as JSON: {"temperature": 0.6}.'),
    ] = {}
    lenient_parameters: Annotated[
        bool,
        Field(
            description="Ignore and log parameters of requests that are unknown or not supported, "
            "for clients that cannot be changed."
        ),
    ] = False
    trust_request_chat_template: Annotated[
        bool, Field(description="Render conversations by the chat_template of a request, if any.")
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, Field(description="Tell in usage how many tokens of a prompt were cached.")
    ] = True
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "hermes",
            "llama3_json",
            "llama4_json",
            "mistral",
            "qwen3_coder",
            "qwen3_xml",
        ],
        Field(description="How the model writes tool calls; auto: as its chat template says."),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "deepseek_r1", "qwen3"],
        Field(description="How the model writes thoughts; auto: as its chat template says."),
    ] = "auto"
