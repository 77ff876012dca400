"""What schemathesis, in an environment of its own, is told of this server.

Without it nearly every case would name a model that there is not, and long answers would take days.
"""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import schemathesis

_kept: dict[str, Any] = json.loads(Path(os.environ["TOPWORK_FUZZ"]).read_text())
_MODEL = _kept["asked"]["model"]
_LENGTH = 3
_count = 0


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Let three of four bodies name a model, and none ask for a long answer."""
    if not isinstance(body, dict):
        return body
    if "model" in body and len(json.dumps(body, default=str)) % 4:
        body["model"] = _MODEL
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if name in body and isinstance(body[name], int):
            body[name] = min(body[name], _LENGTH)
    if "lora_path" in body:
        body["lora_path"] = "/" + str(body["lora_path"])[:50]  # not a name that a hub is asked for
    for name in ("messages", "prompt", "input"):
        if name in body and not {"max_tokens", "max_output_tokens"} & body.keys():
            body["max_output_tokens" if name == "input" else "max_tokens"] = _LENGTH
            break
    return body


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Ask the golden call now and then."""
    global _count
    _count += 1
    if _count % _kept["every"] == 0:
        request = urllib.request.Request(
            f"{_kept['url']}/v1/chat/completions",
            json.dumps(_kept["asked"]).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            choices = json.load(reply)["choices"]
        assert choices == _kept["golden"], f"another golden answer after {_count} cases"
        print(f"{_count} cases", flush=True)
