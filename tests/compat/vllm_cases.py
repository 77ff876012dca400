"""Which of vLLM 0.33's own tests count, and why the others do not.

A case counts if it asks a server over HTTP, needs nothing else of vLLM, and checks what holds for
any text model that chats, embeds and has adapters. Whether it passes plays no part. What needs
vLLM itself is found as it runs (`stand_ins/vllm_package.py`); the rest is here, by reading.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"  # vLLM's own name of the demo model

# The folders of its tests that are about what we serve.
AREAS = (
    "entrypoints/openai",
    "entrypoints/anthropic",
    "tool_use",
    "entrypoints/pooling/basic",
    "entrypoints/pooling/embed",
    "entrypoints/serve/tokenize",
    "entrypoints/serve/lora",
    "entrypoints/serve/instrumentator",
)

# Names of models whose place the demo model takes.
OTHER_NAMES = (
    "HuggingFaceH4/zephyr-7b-beta",
    "NousResearch/Hermes-3-Llama-3.1-8B",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "intfloat/multilingual-e5-small",
    "openai-community/gpt2",
    "sentence-transformers/all-MiniLM-L12-v2",
)

ANSWER = "checks what another model answers"
CALLS = "the model must choose to call a function, which the demo model does not"
LONG = "the model must end a text within some tokens"
THINKS = "the model must think, which the demo model does not"
OTHER = "is of another model, which it names"
VISION = "is of a model that sees"
COHERE = "is of Cohere's API"
OWN = "is of a route that only vLLM has"
OPTION = "is of an option of vLLM's server, and not of its API"
TEXT = "compares the text of vLLM's own message"
FUZZ = "its cases are made of the OpenAPI document of the server that it asks"

# Patterns of cases that do not count, below tests/, with the reason; the first that matches holds.
EXCLUDED: tuple[tuple[str, str], ...] = (
    ("*/test_openai_schema.py*", FUZZ),
    ("*/test_extra_content_fields.py*", OTHER),
    ("*/test_include_reasoning.py*", THINKS),
    ("*/test_thinking_token_budget.py*", THINKS),
    ("*/test_completion_with_prompt_embeds.py*", OPTION),
    ("*/test_chat_completion_with_prompt_embeds.py*", OPTION),
    ("*/test_tensorizer_entrypoint.py*", OPTION),
    ("*/test_root_path.py*", OPTION),
    ("*/test_enable_force_include_usage.py*", OPTION),
    ("*/test_return_tokens_as_ids.py::*[[]True*", OPTION),
    ("*/test_chat_completion.py::test_per_request_metrics*", OPTION),
    ("*/test_chat_echo.py::test_prompt_logprobs", OPTION),  # more than 20, as the next
    ("*/test_chat_echo.py::test_top_logprobs", OPTION),
    ("*/test_basic.py::test_server_load*", OPTION),
    ("*/test_online.py::test_pooling_*", OWN),
    ("*/test_online.py::test_params_not_supported*", TEXT),
    ("*/correctness/test_lmeval.py*", ANSWER),
    ("*/decisions/*", OWN),
    ("*/test_batched_chat_completions.py*", OWN),
    ("*/test_harmony.py*", OTHER),
    ("*/test_mcp_tools.py*", OTHER),
    ("*/test_parsable_context.py*", OTHER),
    ("*/test_namespace_tool_separator.py*", CALLS),
    ("*/test_cohere*", COHERE),
    ("*_vision.py*", VISION),
    ("*_vlm.py*", VISION),
    ("*/test_correctness_mteb.py*", ANSWER),
    ("*/test_online_long_text.py*", "is of a model whose context is too short for a text"),
    ("*/test_online_dimensions.py::*model_info1*", OTHER),
    ("*/test_orca_metrics.py::*orca_header*", OPTION),
    ("*/test_uds.py*", OPTION),
    ("*/test_metrics.py*", "is of vLLM's metrics, and not of its API"),
    ("*/test_basic.py::test_show_version*", "compares vLLM's own version"),
    ("tool_use/mistral/*", OTHER),
    ("tool_use/test_tool_calls.py*", CALLS),
    ("tool_use/test_parallel_tool_calls.py*", CALLS),
    ("tool_use/*[[]llama*", OTHER),
    ("tool_use/*[[]mistral*", OTHER),
    ("tool_use/*[[]granite*", OTHER),
    ("tool_use/*[[]internlm*", OTHER),
    ("tool_use/*[[]toolACE*", OTHER),
    ("*/test_messages.py::test_anthropic_tool_call", CALLS),
    ("*/test_chat.py::test_response_format_json_*", ANSWER),
    ("*/test_chat.py::test_complex_message_content", ANSWER),
    ("*/test_prompt_validation.py::test_empty_prompt", TEXT),
    ("*/test_truncation.py::test_bigger_truncation_size", TEXT),
    ("*/test_lora_adapters.py::test_load_lora_adapter_with_same_name*", ANSWER),
    ("*/test_lora_adapters.py::test_dynamic_lora_badrequests*", TEXT),
    ("*/test_return_token_ids.py::test_chat_completion_with_tool_use", CALLS),
    ("*/test_return_token_ids.py::test_chat_completion_with_emoji*", ANSWER),
    ("*::test_function_tool_use[[]watermarked*", OPTION),
    ("*/test_completion_with_function_calling.py::test_named_tool_use", LONG),
    ("*/test_chat.py::test_structured_outputs_json_chat", LONG),
    ("*/test_messages.py::test_system_message", LONG),
    ("*/test_stateful.py::test_cancel_completed", LONG),
    # The text, or a text in the call's arguments, must end: else the stream ends as incomplete, by
    # vLLM's server as by ours.
    ("*::test_function_calling_with_streaming_types*", LONG),
    ("*/test_simple.py::test_streaming_types*", LONG),
    ("*/test_chat.py::test_more_than_one_prompt_logprobs_chat*", ANSWER),  # the third is expected
    ("*::test_function_tool_use[[]plain-True*", THINKS),
    ("*::test_function_tool_use[[]plain-False-auto*", CALLS),
    ("*/test_function_call.py::test_function_tool_use*", THINKS),
    ("*::test_function_calling_with_streaming_expected_arguments*", CALLS),
    ("*::test_function_calling_with_streaming_forced_tool_choice*auto*", CALLS),
    ("*/responses/test_basic.py::test_simple_input", ANSWER),
    ("*/responses/test_basic.py::test_instructions", ANSWER),
    ("*/responses/test_basic.py::test_chat", ANSWER),
    ("*/test_simple.py::test_reasoning_item*", THINKS),
    ("*/test_simple.py::*_reasoning_tokens_e2e*", THINKS),
    ("*/test_stateful.py::test_previous_response_id", ANSWER),
    ("*/test_stateful.py::test_two_responses_with_same_prev_id", ANSWER),
    ("*/test_structured_output.py::test_structured_output*", ANSWER),
)

# What is true of the model that a test names, and what is true of the demo model instead: counts of
# tokens, sizes of vectors, and that it need not give another answer because it is told to. Our
# calls must name their model.
_CHAT = "tests/entrypoints/openai/chat_completion"
_NAMED = {"responses.create(": f'responses.create(model="{MODEL_NAME}", '}
FACTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        f"{_CHAT}/test_chat.py": {
            "choice1 != choice2": "choice1",
            "ip1 != ip2": "ip1",
            "prompt_tokens=37": "prompt_tokens=26",
            "total_tokens=42": "total_tokens=31",
        },
        # To the other the demo model says nothing.
        "tests/entrypoints/openai/completion/test_completion.py": {
            "What is an LLM?": "Once upon a time",
        },
        "tests/entrypoints/openai/test_return_token_ids.py": {
            "world! How are you today?": "world! Once upon a time",
        },
        "tests/entrypoints/openai/responses/test_basic.py": _NAMED,
        "tests/entrypoints/openai/responses/test_stateful.py": _NAMED,
        "tests/entrypoints/pooling/embed/test_online.py": {
            "384": "576",
            "    0,\n    581,\n    2965,\n    13580,\n    1672,\n    81,\n    23708,\n": (
                "    504,\n    1450,\n    2775,\n    563,\n    386,\n    16421,\n    61,\n"
            ),
            "    594,\n    83,\n    450,\n    442,\n    8060,\n    7,\n": (
                "    314,\n    338,\n    357,\n    6569,\n    800,\n    896,\n"
            ),
            "    5941,\n    12921,\n    115774,\n    2,\n]": "    2859,\n]",
            "== 33\n\n    # test continue": "== 34\n\n    # test continue",
            "== 35": "== 34",
        },
        "tests/entrypoints/serve/instrumentator/test_basic.py": {
            "10100": "8192",
            "10000,\n                extra": "8000,\n                extra",
            '"min_tokens": 10000': '"min_tokens": 8000',
        },
    }
)

# Patterns of cases that count and fail because we differ on purpose, and why we do.
_MISTAKE = "a damaged adapter is the caller's mistake, 400, not a fault of the server's, 500"
DIFFERENCES: Mapping[str, str] = MappingProxyType(
    {
        "*/test_messages.py::test_anthropic_streaming_cache_usage": (
            "every prefix is kept without being asked to, so none is told as created"
        ),
        "*/test_completion.py::test_batch_completions*": "there is no beam search",
        "*/test_lora_adapters.py::test_beam_search*": "there is no beam search",
        "*/test_lora_adapters.py::test_dynamic_lora_invalid_files*": _MISTAKE,
        "*/test_lora_adapters.py::test_loading_invalid_adapters*": _MISTAKE,
        "*/test_online.py::test_padding*": "a prompt is what it is: padding changes its vector",
        "*/test_simple.py::test_enable_response_messages*": (
            "/v1/chat/completions/render shows what a model reads"
        ),
    }
)


def reason_of(case: str) -> str:
    """Return why a case does not count, as far as reading it says; nothing if it may."""
    name = case.removeprefix("tests/")
    return next((why for pattern, why in EXCLUDED if fnmatchcase(name, pattern)), "")


def difference_of(case: str) -> str:
    """Return why a case that counts fails on purpose; nothing if it should pass."""
    name = case.removeprefix("tests/")
    return next((why for pattern, why in DIFFERENCES.items() if fnmatchcase(name, pattern)), "")
