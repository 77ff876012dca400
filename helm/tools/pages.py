"""values.yaml and the chart's README as text, out of the values and their schema.

Owns their form.
"""

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from helm.tools.schema import Schema, topwork_keys, type_name, values_schema
from helm.tools.values import Values

_HEAD = (
    "# Made by `python -m helm.tools.generate` from helm/tools/values*.py: change those.\n"
    "# Every key is described in README.md, too; values.schema.json refuses any other.\n"
)
_MARK = "<!-- values -->"
_MAX_WIDTH = 96


def values_yaml() -> str:
    """Return the defaults, each under its description."""
    return _HEAD + "\n".join(_block(Values(), 0, set())) + "\n"


def readme(introduction: Path) -> str:
    """Return the introduction with two tables where it says so."""
    text = introduction.read_text()
    assert text.count(_MARK) == 1, f"{introduction} has one line {_MARK}"
    return text.replace(_MARK, _tables())


def _block(part: BaseModel, depth: int, described: set[str]) -> list[str]:
    """Return the lines of a part; a kind of part is described where it first occurs."""
    pad = "  " * depth
    lines = []
    name = type(part).__name__
    is_new = name not in described
    described.add(name)
    for key, field in type(part).model_fields.items():
        value = getattr(part, key)
        if is_new:
            lines += _comment(field.description or "", pad)
        if isinstance(value, BaseModel):
            lines += [f"{pad}{key}:", *_block(value, depth + 1, described)]
        else:
            lines += _entry(key, value, pad)
    return lines


def _comment(text: str, pad: str) -> list[str]:
    lines, line = [], f"{pad}#"
    for word in text.split():
        if len(line) + 1 + len(word) > _MAX_WIDTH:
            lines.append(line)
            line = f"{pad}#"
        line += f" {word}"
    return [*lines, line]


def _entry(key: str, value: Any, pad: str) -> list[str]:
    if isinstance(value, dict | list) and value:
        text = yaml.safe_dump({key: value}, default_flow_style=None, sort_keys=False)
        return [pad + line for line in text.rstrip().split("\n")]
    return [f"{pad}{key}: {json.dumps(value)}"]  # JSON's scalars are YAML's


def _tables() -> str:
    schema = values_schema()
    rows = ["| value | type | default | what |", "| --- | --- | --- | --- |"]
    rows += _rows(schema, schema, Values().model_dump(), "")
    rows += ["", "Keys of `topwork:`, which are those of `topwork serve`:", ""]
    rows += ["| key | type | what |", "| --- | --- | --- |"]
    rows += [f"| `{name}` | {kind} | {_cell(text)} |" for name, kind, text in topwork_keys()]
    return "\n".join(rows)


def _rows(root: Schema, node: Schema, defaults: dict[str, Any], prefix: str) -> list[str]:
    rows = []
    for key, schema in node["properties"].items():
        if key == "global":
            continue
        path = f"{prefix}{key}"
        target = _resolve(root, schema)
        if "properties" in target and path != "topwork":
            rows += _rows(root, target, defaults[key], f"{path}.")
            continue
        default = json.dumps(defaults[key])
        kind = "object" if path == "topwork" else type_name(target)
        rows.append(f"| `{path}` | {kind} | `{default}` | {_cell(schema['description'])} |")
    return rows


def _resolve(root: Schema, schema: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    target: Schema = root["definitions"][schema["$ref"].rpartition("/")[2]]
    return target


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
