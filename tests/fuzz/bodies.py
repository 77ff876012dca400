"""Bodies of every route that ask for too much, for nothing that there is, or for nonsense."""

from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.forms import TEMPLATES, form, function, schema, tools
from tests.fuzz.values import Bodies, anything, large, nested, number, text, token_ids

Body = dict[str, Any]
LENGTH = 3  # tokens of an answer at most: what is hostile is the call
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ADAPTERS = "/v1/adapters/"
NAMES = """
temperature top_p top_k min_p presence_penalty frequency_penalty n seed min_tokens
repetition_penalty logit_bias stop stop_token_ids bad_words allowed_token_ids cache_salt
priority stream stream_options logprobs top_logprobs prompt_logprobs truncate_prompt_tokens lora
user metadata request_id rid response_format best_of echo documents tools thinking_token_budget
reasoning_effort chat_template_kwargs messages prompt model unknown max_tokens tool_choice
add_special_tokens ignore_eos suffix text reasoning input include previous_response_id system
thinking stop_sequences query dimensions encoding_format tokens truncation background store
""".split()  # noqa: SIM905


def sound(random: Random, model: str) -> tuple[str, Body]:
    """Return the path and the body of a call that is in order."""
    chat: Body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": LENGTH}
    kinds: list[tuple[str, Body]] = [
        (CHAT, chat),
        (COMPLETION, {"prompt": "Hello", "max_tokens": LENGTH}),
        (RESPONSES, {"input": "Hello", "max_output_tokens": LENGTH}),
        (MESSAGES, chat),
        ("/v1/embeddings", {"input": "Hello"}),
        ("/tokenize", {"prompt": "Hello"}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
        ("/v1/messages/count_tokens", {"messages": chat["messages"]}),
        ("/v1/chat/completions/render", chat),
        ("/v1/completions/render", {"prompt": "Hello", "max_tokens": LENGTH}),
        ("/v1/score", {"text_1": "Hello", "text_2": ["Hi", "Ho"]}),
        ("/v1/rerank", {"query": "Hello", "documents": ["Hi", "Ho"]}),
        ("/v1/classify", {"input": "Hello"}),
    ]
    path, body = random.choice(kinds)
    return path, {"model": model, **body}


def answering(random: Random, model: str) -> tuple[str, Body]:
    """Return likewise one whose answer can have a form."""
    path, body = random.choice(
        [
            (CHAT, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": LENGTH}),
            (COMPLETION, {"prompt": "Hello", "max_tokens": LENGTH}),
            (RESPONSES, {"input": "Hello", "max_output_tokens": LENGTH}),
        ]
    )
    return path, {"model": model, **body}


Maker = Callable[[Random, Bodies, str], tuple[str, Any]]


def _strange_field(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    path, body = sound(random, model)
    for _ in range(random.randint(1, 2)):
        body[random.choice(NAMES)] = anything(random, bodies)
    return path, body


def _field_of_its_own(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    path, body = sound(random, model)
    body[random.choice([*body])] = anything(random, bodies)
    return path, body


def _numbers(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    path, body = answering(random, model)
    for name in random.sample(NAMES, 3):
        body[name] = number(random)
    body["logit_bias"] = random.choice(
        [{}, {"5": number(random)}, {"-1": 1}, {"9" * 50: 1}, {"1e3": 1}]
    )
    return path, body


def _text_somewhere(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    path, body = sound(random, model)
    given = text(random)
    if "messages" in body:
        role = random.choice(["user", "assistant", "system", "tool", given])
        body["messages"] = [{"role": role, "content": given}, *body["messages"]]
    elif "prompt" in body:
        body["prompt"] = given
    elif "input" in body:
        body["input"] = random.choice([given, [given]])
    body |= random.choice(
        [{}, {"stop": given}, {"cache_salt": given}, {"bad_words": [given]}, {"model": given}]
    )
    return path, body


def _tokens(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    name = random.choice(["stop_token_ids", "allowed_token_ids"])
    return random.choice(
        [
            (COMPLETION, {"model": model, "prompt": token_ids(random), "max_tokens": LENGTH}),
            (COMPLETION, {"model": model, "prompt": [token_ids(random)] * 3, "max_tokens": 1}),
            (COMPLETION, {"model": model, "prompt": "a", "max_tokens": 1, name: token_ids(random)}),
            ("/v1/embeddings", {"model": model, "input": token_ids(random)}),
            ("/v1/embeddings", {"model": model, "input": [token_ids(random)] * 5}),
            ("/detokenize", {"tokens": token_ids(random)}),
        ]
    )


def _large(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    value = large(random)
    chat = {"model": model, "messages": [{"role": "user", "content": value}], "max_tokens": LENGTH}
    return random.choice(
        [
            (CHAT, chat),
            (COMPLETION, {"model": model, "prompt": value, "max_tokens": LENGTH}),
            (
                COMPLETION,
                {"model": model, "prompt": value, "max_tokens": 1, "truncate_prompt_tokens": 5},
            ),
            (RESPONSES, {"model": model, "input": value, "max_output_tokens": LENGTH}),
            (
                RESPONSES,
                {"model": model, "input": value, "truncation": "auto", "max_output_tokens": 1},
            ),
            (MESSAGES, chat),
            ("/v1/embeddings", {"model": model, "input": value}),
            ("/tokenize", {"prompt": value}),
            ("/detokenize", {"tokens": value}),
        ]
    )


def _many(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    count = random.choice([1_000, 16_384, 20_000, 60_000, 200_000, 400_000])
    chat: Body = {"model": model, "max_tokens": 1}
    turn = {"role": "user", "content": "a"}
    makers: list[Callable[[], tuple[str, Any]]] = [
        lambda: (CHAT, chat | {"messages": [turn] * count}),
        lambda: (CHAT, chat | {"messages": [{**turn, "x": [1] * count}]}),
        lambda: (CHAT, chat | {"messages": [turn], **{f"k{i}": 1 for i in range(count)}}),
        lambda: (
            CHAT,
            chat
            | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * count}]},
        ),
        lambda: (CHAT, chat | {"messages": [turn], "stop": ["a"] * count}),
        lambda: (
            CHAT,
            chat | {"messages": [turn], "logit_bias": {f"{i}": 1 for i in range(count)}},
        ),
        lambda: (MESSAGES, chat | {"messages": [turn] * count}),
        lambda: (RESPONSES, {"model": model, "input": [turn] * count, "max_output_tokens": 1}),
        lambda: (COMPLETION, chat | {"prompt": ["a"] * count}),
        lambda: (COMPLETION, chat | {"prompt": [[5]] * count}),
        lambda: ("/v1/embeddings", {"model": model, "input": ["a"] * count}),
        lambda: ("/v1/completions/render", chat | {"prompt": [[5]] * count}),
        lambda: ("/tokenize", {"messages": [turn] * count}),
    ]
    return random.choice(makers)()


def _forms(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    path, body = answering(random, model)
    return path, body | form(random, bodies)


def _tools(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    if random.random() < 0.2:
        named = {"name": "f", "input_schema": schema(random, bodies), "strict": True}
        body = {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": LENGTH,
            "tools": [named],
        }
        return MESSAGES, {"model": model, "tool_choice": {"type": "any"}, **body}
    if random.random() < 0.2:
        given = [{"type": "function", **function(random, bodies)}] if random.random() < 0.8 else 5
        body = {
            "input": "a",
            "max_output_tokens": LENGTH,
            "tools": given,
            "tool_choice": "required",
        }
        return RESPONSES, {"model": model, **body}
    call = {"id": text(random), "type": "function", "function": {"name": "f", "arguments": "{" * 3}}
    turns: list[Any] = [{"role": "user", "content": "a"}]
    if random.random() < 0.3:
        call["function"] = random.choice(
            [call["function"], function(random, bodies), None, {"name": 5}]
        )
        turns += [
            {"role": "assistant", "tool_calls": random.choice([[call], [call] * 600, call, [None]])}
        ]
        turns += [
            {"role": "tool", "tool_call_id": text(random), "content": anything(random, bodies)}
        ]
    return CHAT, {"model": model, "messages": turns, "max_tokens": LENGTH, **tools(random, bodies)}


def _templates(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    body: Body = {"model": model, "messages": [{"role": "user", "content": text(random)}]}
    body |= {"max_tokens": LENGTH, "chat_template": random.choice(TEMPLATES)}
    if random.random() < 0.4:
        del body["chat_template"]
        body["chat_template_kwargs"] = random.choice(
            [{text(random): text(random)}, {"messages": []}, {"tools": 5}, {"x": [[1] * 999] * 99}]
            + [{"strftime_now": 1}, {"eos_token": None}, {"x": bodies.raw(nested(random))}]
        )
    return CHAT, body


def _items(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    strange = anything(random, bodies)
    block = random.choice(
        [
            {"type": "text", "text": strange},
            {"type": "tool_use", "id": strange, "name": "f", "input": strange},
            {"type": "tool_result", "tool_use_id": "x", "content": strange},
            {"type": strange},
            strange,
            {"type": "thinking", "thinking": strange},
            {"type": "image", "source": strange},
        ]
    )
    item = random.choice(
        [
            {"role": "user", "content": strange},
            {"type": "function_call", "call_id": strange, "name": "f"},
            {"type": "function_call_output", "call_id": "x", "output": strange},
            {"type": "reasoning", "content": strange},
            {"type": "message", "role": strange, "content": "a"},
            strange,
        ]
    )
    messages = [{"role": random.choice(["user", "assistant", strange]), "content": [block]}]
    return random.choice(
        [
            (
                MESSAGES,
                {"model": model, "max_tokens": LENGTH, "messages": messages, "system": strange},
            ),
            (MESSAGES, {"model": model, "max_tokens": LENGTH, "messages": messages}),
            (RESPONSES, {"model": model, "input": [item, item], "max_output_tokens": LENGTH}),
            (
                RESPONSES,
                {
                    "model": model,
                    "input": "a",
                    "previous_response_id": strange,
                    "max_output_tokens": LENGTH,
                },
            ),
            (
                CHAT,
                {
                    "model": model,
                    "max_tokens": 1,
                    "messages": [{"role": "user", "content": [block]}],
                },
            ),
        ]
    )


def _adapters(random: Random, bodies: Bodies, model: str) -> tuple[str, Any]:
    name = random.choice(["x", "", " ", "a/b", "../x", "base", model, "ü", text(random)])
    path = random.choice(
        [
            "/etc/passwd",
            "/dev/zero",
            "/proc/self/mem",
            "/",
            "",
            "x" * 5_000,
            "/tmp",
            "\x00",
            "s3://",
            "/dev/shm/none",
        ]
        + [
            "file:///etc/passwd",
            "gs://a/b",
            "http://127.0.0.1:1/a",
            "https://",
            "~root",
            "$HOME",
            text(random),
        ]
    )
    tensors = {
        "lora_name": name,
        "config_dict": anything(random, bodies),
        "serialized_tensors": "AAAA",
    }
    return random.choice(
        [
            ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}),
            ("/load_lora_adapter", {"lora_name": name, "lora_path": path}),
            ("/load_lora_adapter_from_tensors", tensors),
            (
                "/load_lora_adapter_from_tensors",
                tensors | {"serialized_tensors": anything(random, bodies)},
            ),
            ("/v1/unload_lora_adapter", {"lora_name": "no-" + str(name)}),
            ("/unload_lora_adapter", {"lora_name": anything(random, bodies)}),
            (ADAPTERS + "none/split", {"1": number(random), "2": 50}),
            (ADAPTERS + "none/rollback", {"version": number(random)}),
            (ADAPTERS + "none/pin", anything(random, bodies)),
            (
                COMPLETION,
                {"model": model, "prompt": "a", "max_tokens": 1, "lora": anything(random, bodies)},
            ),
            (
                COMPLETION,
                {
                    "model": model,
                    "prompt": "a",
                    "max_tokens": 1,
                    "lora": [{"name": name, "weight": number(random)}],
                },
            ),
        ]
    )


MAKERS: dict[str, tuple[Maker, int]] = {
    "a strange field": (_strange_field, 14),
    "a strange value of a field that is needed": (_field_of_its_own, 10),
    "numbers": (_numbers, 8),
    "texts": (_text_somewhere, 10),
    "token ids": (_tokens, 8),
    "large prompts": (_large, 2),
    "many values": (_many, 2),
    "forms": (_forms, 20),
    "tools": (_tools, 10),
    "templates": (_templates, 4),
    "blocks and items": (_items, 8),
    "adapters": (_adapters, 4),
}
