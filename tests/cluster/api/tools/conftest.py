"""Models whose templates know tools and thoughts, made from the tiny one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.router.tokenizer import Tokenizer
from tests.cluster.conftest import EOS, Serving

SYSTEM = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}\nWrite OPEN<|im_end|>\n{% endif %}"
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "<call {{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
TEMPLATES = {
    "hermes": SYSTEM.replace("OPEN", "<tool_call>") + TURNS,
    "mistral": SYSTEM.replace("OPEN", "[TOOL_CALLS]") + TURNS,
    "llama3_json": SYSTEM.replace("OPEN", "<|python_tag|>") + TURNS,
    "qwen3_xml": SYSTEM.replace("OPEN", "<tool_call><function=f><parameter=p>") + TURNS,
    "thinking": SYSTEM.replace("OPEN", "<tool_call>") + TURNS + THINKING,
    "opened": TURNS + "<think>\n{# </think> #}",
    "effort": TURNS + "{{ reasoning_effort }}",
}
SPECIAL = ("[TOOL_CALLS]", "<|python_tag|>")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="session")
def model_of(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from the name of a template to a model that has it."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            directory = made[name] = tmp_path_factory.mktemp(name) / "model"
            shutil.copytree(model_dir, directory)
            config = json.loads((directory / "tokenizer_config.json").read_text())
            config["chat_template"] = TEMPLATES[name]
            (directory / "tokenizer_config.json").write_text(json.dumps(config))
            raw = json.loads((directory / "tokenizer.json").read_text())
            first = raw["added_tokens"][0]
            number = 1 + max([*raw["model"]["vocab"].values()])
            for text in ("<tool_call>", "</tool_call>", "<think>", "</think>", *SPECIAL):
                token = {"id": number, "content": text, "special": text in SPECIAL}
                raw["added_tokens"].append(first | token)
                number += 1
            (directory / "tokenizer.json").write_text(json.dumps(raw))
        return made[name]

    return make


@pytest.fixture
def start(serve: Callable[..., Serving], model_of: Callable[[str], Path]) -> Callable[..., Serving]:
    """Return a function that serves a model whose answers say a text."""

    def made(template: str, text: str, *, ends: bool = True, **changes: Any) -> Serving:
        path = model_of(template)
        tokenizer = Tokenizer.load(path)
        tokens = tokenizer.encode(text, False) + ((EOS,) if ends else ())
        return serve(
            FakeScheduler(lambda _: Script(tokens), vocab_size=tokenizer.num_tokens),
            model_dir=str(path),
            vocab_size=tokenizer.num_tokens,
            context_length=4096,
            **changes,
        )

    return made
