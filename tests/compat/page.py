"""docs/compatibility.md, the page of what is served: `python -m tests.compat.page`.

What is served and refused is read from the routes of the application and the models of their
bodies; whose parameters there are is in `peers`, and what became of vLLM's tests in results.json.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cluster.api.responses.body import FOREIGN, ResponseBody
from cluster.api.schemas.not_served import WHY_NOT as WHY_NO_PARAMETER
from cluster.api.schemas.requests import HARMLESS, Body
from cluster.router.config import RouterConfig
from tests.compat.peers import PARAMETERS, ROUTES
from tests.compat.peers import WHY_NOT as WHY_NO_ROUTE
from tests.compat.report import RESULTS
from tests.compat.vllm_cases import COHERE, MODEL_NAME, OPTION, OWN, difference_of
from tests.docs.pages import routes_only

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "compatibility.md"
INTRODUCTION = """# Compatibility

Made by `python -m tests.compat.page`: do not edit. What is served is read from the routes and the
bodies of the application, and [api.md](api.md) says what it does; the names of others are in
`tests/compat/peers.py`, of openai 3.54, anthropic 2.12, vLLM 0.33.0 and SGLang 0.5.23.

A parameter that is not served is refused with 400, its name and the reason, unless its value asks
for nothing: null always does, and what the last column says. `--lenient-parameters` ignores it
instead, and logs its name.
"""


def bodies() -> dict[str, type[Body]]:
    """Return the model of each route's body, by method and path; Body for those without one."""
    config = RouterConfig(
        model_dir="", model_name="base", context_length=1, vocab_size=1, eos_token_ids=()
    )
    models = {model.__name__: model for model in _kinds_of(Body)}
    found: dict[str, type[Body]] = {}
    for path, methods in routes_only(config).openapi()["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {"content": {}})["content"]
            reference = content.get("application/json", {"schema": {}})["schema"].get("$ref", "")
            found[f"{method.upper()} {path}"] = models.get(reference.rpartition("/")[2], Body)
    return found


def _kinds_of(model: type[Body]) -> list[type[Body]]:
    return [model, *(one for kind in model.__subclasses__() for one in _kinds_of(kind))]


def verdict(body: type[Body], name: str) -> tuple[str, str, str]:
    """Return (what becomes of a parameter, why it is refused, values that ask for nothing)."""
    aliases = {field.alias for field in body.model_fields.values()}
    if body is ResponseBody and name in FOREIGN:
        instead = FOREIGN[name]
        return "refused", f"use `{instead}`" if instead else WHY_FOREIGN[name], ""
    if name in body.model_fields or name in aliases:
        return "served", "", ""
    if name in HARMLESS:
        return "accepted, says nothing of the answer", "", ""
    neutral = body.neutral_values.get(name, ())
    shown = ", ".join(f"`{json.dumps(value)}`" for value in neutral)
    return "refused", WHY_NO_PARAMETER.get(name) or WHY_OF_CALL.get(name, ""), shown


# What a call of /v1/responses may not say that other calls for text may.
WHY_FOREIGN = {
    "n": "a response is one answer",
    "stop": "OpenAI's has none",
    "include_stop_str_in_output": "there is no `stop`",
    "return_token_ids": "use `/v1/completions`",
}
# Parameters of one or two calls that others of ours have.
WHY_OF_CALL = {
    "access_programs": "the caller runs the tools",
    "background_options": "use `background`",
    "betas": "what is built is always there",
    "chat_template_kwargs": "a query and a document are no conversation",
    "documents": "of a call without a conversation",
    "echo": "of a completion",
    "image": "models of text only",
    "instruct": "put it into the query",
    "instruction": "put it into the query",
    "is_3d_lora_weight": "the file of an adapter tells it",
    "lora_int_id": "adapters are known by their names and contents",
    "max_tokens_per_doc": "use `truncate_prompt_tokens`",
    "max_tokens_per_query": "use `truncate_prompt_tokens`",
    "prompt": "no templates of prompts are kept",
    "reasoning_effort": "of a chat",
    "rid": "use `request_id`",
    "speed": "there is one",
    "thinking": "use `chat_template_kwargs`",
    "tool_choice": "of a conversation",
    "truncation_side": "the last tokens are kept",
    "user_profile_id": "use `metadata.user_id`",
    "workspace_id": "keys have tenants",
}


def page() -> str:
    """Return the whole page."""
    ours = bodies()
    parts = [INTRODUCTION, "## Routes\n\n" + _routes(ours)]
    for path, peers in PARAMETERS.items():
        parts.append(f"## POST {path}\n\n" + _parameters(ours[f"POST {path}"], peers))
    return "\n".join([*parts, _tests(json.loads(RESULTS.read_text()))])


def _routes(ours: Mapping[str, object]) -> str:
    rows = []
    for route, owners in ROUTES.items():
        is_served = route in ours
        rows.append((f"`{route}`", owners, "served" if is_served else "no", ""))
        if not is_served:
            rows[-1] = (*rows[-1][:3], WHY_NO_ROUTE[route])
    return _table(("route", "of", "", "why not"), rows)


def _parameters(body: type[Body], peers: Mapping[str, Iterable[str]]) -> str:
    owners: dict[str, list[str]] = {}
    for peer, names in peers.items():
        for name in names:
            owners.setdefault(name, []).append(peer)
    rows = [(f"`{name}`", ", ".join(of), *verdict(body, name)) for name, of in owners.items()]
    served = [row for row in rows if row[2] != "refused"]
    refused = [row for row in rows if row[2] == "refused"]
    text = _table(("parameter", "of", ""), sorted(row[:3] for row in served))
    if refused:
        heads = ("refused", "of", "why", "taken all the same")
        cells = sorted((name, of, why, neutral) for name, of, _, why, neutral in refused)
        text += "\n" + _table(heads, cells)
    own = sorted(body.model_fields.keys() - owners.keys())
    if own:
        names = ", ".join(f"`{body.model_fields[name].alias or name}`" for name in own)
        text += f"\nOf ours, or of older versions of theirs: {names}.\n"
    return text


TESTS = """## vLLM's own tests

`make test-vllm` gets vLLM {version}'s source package and runs its tests of the OpenAI server, the
Anthropic front end, tool use and embeddings against `topwork serve` with the demo model. A case
counts if it asks a server over HTTP, needs nothing else of vLLM, and checks what holds for any
text model that chats, embeds and has adapters; whether it passes plays no part. Of the {cases}
cases in files that start a server {counted} count, and **{passed} of them pass ({share:.1%})**.
Were the cases of routes and options that only vLLM's server has, and of Cohere's API, counted as
failures, it would be {strict:.1%}.

In the tests' files the demo model's name stands for those of other models, and in a few places what
is true of it for what is true of them; their flags are passed on but for those that say how numbers
are kept or how many run at once. All of this is in `tests/compat/vllm_cases.py` and
`tests/compat/stand_ins/servers.py`.

"""


def _tests(results: Mapping[str, Any]) -> str:
    share = results["passed"] / max(results["counted"], 1)
    of_vllm = sum(results["not_counted"].get(why, 0) for why in (OPTION, OWN, COHERE))
    strict = results["passed"] / max(results["counted"] + of_vllm, 1)
    text = TESTS.format(**results, share=share, strict=strict)
    if results.get("not_run"):
        names = " and ".join(results["not_run"])
        text += f"The run was ended before {names}, whose cases are in no count.\n\n"
    failed = [
        (f"`{case.replace(MODEL_NAME, 'demo').rpartition('/')[2]}`", difference_of(case))
        for case in results["failed"]
    ]
    text += _table(("fails", "why"), failed) + "\n"
    left_out = sorted(results["not_counted"].items(), key=lambda one: (-one[1], one[0]))
    return text + _table(("cases that do not count", ""), ((str(n), why) for why, n in left_out))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    FILE.write_text(page())
