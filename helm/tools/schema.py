"""values.schema.json out of the values and of ServeConfig, as Helm reads it.

Owns what the chart takes over from ServeConfig and what it decides itself.
"""

from typing import Any

from deploy.config import ServeConfig
from helm.tools.values import Values

# The chart says these itself: they follow from volumes, secrets, the service and the ingress.
DECIDED = ("model", "host", "port", "api_key_file", "ray_address", "tls_cert", "tls_key")
Schema = dict[str, Any]


def values_schema() -> Schema:
    """Return the JSON schema of the chart's values."""
    schema = Values.model_json_schema(ref_template="#/definitions/{model}")
    schema["definitions"] = schema.pop("$defs")
    topwork = _topwork_schema()
    schema["properties"]["topwork"] = {
        "description": schema["properties"]["topwork"]["description"],
        "$ref": "#/definitions/ServeConfig",
    }
    schema["definitions"]["ServeConfig"] = topwork
    # Helm hands subcharts and parents `global`, whoever wants it.
    schema["properties"]["global"] = {"type": "object", "description": "Helm's; not used here."}
    for part in (schema, *schema["definitions"].values()):
        for key in part["properties"].values():
            if "$ref" in key:  # pydantic says what both say only once
                target = schema["definitions"][key["$ref"].rpartition("/")[2]]
                key.setdefault("description", target["description"])
    plain: Schema = _without_titles(schema)
    plain["$schema"] = "http://json-schema.org/draft-07/schema#"  # the newest that Helm 3 reads
    return plain


def topwork_keys() -> list[tuple[str, str, str]]:
    """Return name, type and meaning of each key that `topwork:` takes."""
    keys = _topwork_schema()["properties"]
    return [(name, type_name(key), key["description"]) for name, key in keys.items()]


def _topwork_schema() -> Schema:
    """Return ServeConfig's schema without what the chart decides."""
    schema = ServeConfig.model_json_schema()
    assert "$defs" not in schema, "ServeConfig is flat"
    schema["properties"] = {
        name: key for name, key in schema["properties"].items() if name not in DECIDED
    }
    # The head, where the question would be asked, has no GPU.
    schema["properties"]["device"].update(enum=["cpu", "cuda"], default="cpu")
    schema["required"] = ["device"]
    return schema


def _without_titles(node: Any) -> Any:
    """Return a schema without the titles that pydantic makes of names."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value)
        for key, value in node.items()
        if not (key == "title" and isinstance(value, str))
    }


def type_name(key: Schema) -> str:
    """Return how a table names the type of a key."""
    if "enum" in key:
        return ", ".join(f"`{value}`" for value in key["enum"])
    if "const" in key:
        return f"`{key['const']}`"
    if "anyOf" in key:
        names = [type_name(option) for option in key["anyOf"]]
        return " or ".join(name for name in names if name != "null")
    if "type" in key:
        return str(key["type"])
    return "object"
