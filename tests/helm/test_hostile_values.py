"""Text in values is text: it never becomes structure of an object."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import helm_python
import pytest
import yaml

from tests.helm.charts import chart, render, values_of

BENIGN = "benign"
HOSTILE = "a\"b': {c}\n- d: [e] # {{ f }}\ttrue"
# The first are templates, and say so; the others are refused, as other tests show.
NOT_TRIED = {
    ("extraObjects",),
    ("nameOverride",),
    ("fullnameOverride",),
    ("model", "hubId"),
    ("adapters", "configMap"),
    ("tokenRules", "configMapName"),
}


@pytest.mark.parametrize("name", ["everything", "object-store", "deployment-keda", "image-volume"])
def test_a_string_with_marks_of_yaml_stays_a_string(name: str) -> None:
    values = chart().merge_values(values_of(name))
    free = [path for path in strings(values) if is_free(path)]
    assert ("model", "mountPath") not in free  # a path begins with /
    assert len(free) > 40
    hostile, benign = values, values
    for number, path in enumerate(free):  # numbered: no two strings can be taken for each other
        hostile = replaced(hostile, path, f"{number}{HOSTILE}")
        benign = replaced(benign, path, f"{number}{BENIGN}")
    assert plain(render(hostile)) == plain(render(benign))


@cache
def is_free(path: tuple[Any, ...]) -> bool:
    """Tell whether schema and validation leave open what a string says."""
    if {path[:1], path[:2]} & NOT_TRIED:
        return False
    alone: Any = HOSTILE
    for key in reversed(path):
        alone = [alone] if isinstance(key, int) else {key: alone}
    try:
        chart().validate_schema(alone)
    except helm_python.HelmValuesError:
        return False
    return True


def plain(node: Any) -> Any:
    """Return objects with the benign text for the hostile one, in texts that are YAML too."""
    if isinstance(node, dict):
        return {plain(key): plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain(item) for item in node]
    if not isinstance(node, str):
        return node
    if node.startswith(("proxy_location:", "adapter:", "api_key_file:")):
        return plain(yaml.safe_load(node))
    # The name of a configuration holds a digest of it.
    return re.sub("-config-[0-9a-f]{8}$", "", node.replace(HOSTILE, BENIGN))


def strings(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return where the strings of values are."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from strings(value, (*path, key))
    elif isinstance(node, str):
        yield path


def replaced(node: Any, path: tuple[Any, ...], text: str) -> Any:
    """Return values with another text at a place."""
    if not path:
        return text
    key, *rest = path
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[key] = replaced(node[key], tuple(rest), text)
    return copy
