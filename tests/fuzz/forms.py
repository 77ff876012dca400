"""Forms of answers, tools and templates that are hard to follow."""

from random import Random
from typing import Any

from tests.fuzz.values import Bodies, anything, nested, text

REGEXES = (
    "(a+)+$",
    "(a|a)*b",
    "(.*a){40}",
    "(a{1,1000}){1,1000}",
    "x{1000000}",
    "(x{100}){100}y",
    "a{2,1}",
    "(?=a)b",
    "(?<!a)b",
    r"(a)\1",
    r"\p{L}+",
    r"\p{Nope}",
    "[",
    "(",
    "*a",
    "a**",
    "",
    "^",
    "$",
    "^$",
    "(" * 20_000,
    "(a" * 500 + ")" * 500,
    "[^\\x00-\\U0010ffff]",
    "[z-a]",
    r"\u{110000}",
    "(?P<a>b)(?P<a>c)",
    "(((((((a*)*)*)*)*)*)*)*",
    "|" * 5_000,
    "a|" * 20_000,
    ".{0,60000}",
    "(?i)" + "ſ" * 300,
    "\\",
    "\x00",
    "(a?){300}a{300}",
    "([a-z]+[0-9]*){50}",
    r"(\d+,)*\d+",
    "\ud800",
    r"\b\B\A\z",
    "[[:alpha:]&&[^a]]",
)
GRAMMARS = (
    'start: start "a" | "b"',
    "start: start",
    "start: other",
    "start: a\na: b\nb: a",
    'start: "a"*' * 900,
    'start: a a a a a a a a\na: "" | a a',
    "start: /(a+)+b/",
    "start: ",
    "",
    "start",
    'start: "a',
    "start: /a",
    "%import common.WS\nstart: WS",
    '%llguidance {}\nstart: "a"',
    "%ignore /a*/\nstart: /a*/",
    "start: %json {",
    'start: %json {"type": "array", "minItems": 1000000000}',
    'start: "a"~1000000',
    "start: <[1-99999999]>",
    'root ::= root | "a"',
    'root ::= "a" root "b" |',
    'root ::= [^"\\\\]* (',
    "root ::= other",
    'root ::= "a"{1000000}',
    "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"\nstart: r0',
    "start: " + " | ".join(f'"{i}"' for i in range(9_000)),
    "start: " + "(" * 5_000,
    'start: "\ud800"',
    "start: <|im_end|>",
    'start: "" start ""',
    "start[capture]: /x/",
    'start: a\na[lazy]: /.*/ "b"\n' * 50,
)
TEMPLATES = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ ''.__class__.__mro__ }}",
    "{% for",
    "{{ raise_exception('no') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% include 'x' %}",
    "",
    "{{ messages | tojson | length }}" * 50,
    "{% set x = [] %}{% for i in range(999999) %}{{ x.append(i) }}{% endfor %}",
    "{{ 1 / 0 }}",
    "{{ self }}",
    "{{ namespace(a=1).b.c }}",
    "{{ [0] * 10**9 }}",
    "{{ (10**10**7) }}",
    "{" * 100_000,
    "{% if True %}" * 300,
    "{{ lipsum(n=100000) }}",
    "{{ cycler.__init__.__globals__ }}",
    "plain text",
    "{{ '\ud800' }}",
    "{{ messages[0].content.format(messages) }}",
    "{% call m() %}{% endcall %}",
    "{{ strftime_now('%' * 100000) }}",
)


def schema(random: Random, bodies: Bodies) -> Any:
    """Return a JSON schema that asks for too much, or is none."""
    a = {"type": "string"}
    many = {f"p{i}": a for i in range(random.choice([200, 3_000]))}
    deep: Any = a
    for _ in range(random.choice([20, 200])):
        deep = (
            {"anyOf": [deep, {"type": "array", "items": deep}]}
            if random.random() < 0.05
            else {"items": deep}
        )
    made = [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"allOf": [{"$ref": "#"}]},
        {"$ref": "http://127.0.0.1:1/x"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": 5},
        {"$ref": "#/nowhere"},
        {"$ref": "#/" + "a/" * 2_000},
        {"enum": [f"{i}" for i in range(20_000)]},
        {"enum": []},
        {"type": "array", "minItems": 10**9},
        {"type": "array", "minItems": 10**9, "items": a, "uniqueItems": True},
        {"type": "array", "maxItems": 10**18, "items": a},
        {"type": "string", "minLength": 10**9},
        {"type": "string", "maxLength": 10**9},
        {"type": "object", "minProperties": 10**6},
        {"type": "integer", "multipleOf": 1e-300},
        {"type": "number", "minimum": 1e308, "maximum": -1e308},
        {"type": "integer", "minimum": 10**300},
        {"not": {}},
        {"type": "string", "pattern": random.choice(REGEXES)},
        {"patternProperties": {random.choice(REGEXES): a}},
        {"oneOf": [a] * 2_000},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"anyOf": []},
        {"const": {"a": [[]]}},
        {"type": "object", "properties": many, "required": [*many]},
        {"type": 5},
        {"properties": []},
        {"required": {}},
        deep,
        {"type": "object", "properties": {text(random): a}, "additionalProperties": False},
        {"type": ["string", "null"] * 400},
        {"if": {}, "then": {"$ref": "#"}, "else": False},
        {"$dynamicRef": "#a"},
        {"format": "nope", "type": "string"},
        True,
        [],
        "",
        {"prefixItems": [a] * 3_000, "items": False, "minItems": 3_000},
        {"type": "string", "enum": [text(random)]},
        None,
        {"dependentSchemas": {"a": {"$ref": "#"}}},
        {"unevaluatedProperties": {"$ref": "#"}},
        {"allOf": [{"anyOf": [a, a]}] * 30},
        bodies.raw(nested(random)),
        anything(random, bodies),
    ]
    return random.choice(made)


def structural_tag(random: Random, bodies: Bodies) -> Any:
    """Return a structural tag."""
    one = {"begin": text(random), "schema": schema(random, bodies), "end": text(random)}
    good = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}
    structures = random.choice([[one], [good, one], [good] * 129, [], [anything(random, bodies)]])
    triggers = random.choice([["<f>"], ["<"], [], [""], [text(random)], ["<f>"] * 200, None])
    return {"type": "structural_tag", "structures": structures, "triggers": triggers}


def form(random: Random, bodies: Bodies) -> dict[str, Any]:
    """Return parameters that ask for a form, one or two at once."""
    made: list[dict[str, Any]] = [
        {"guided_json": schema(random, bodies)},
        {"guided_regex": random.choice(REGEXES)},
        {
            "guided_choice": random.choice(
                [[], [""], ["a"] * 5_000, [text(random)], ["a" * i for i in range(1, 400)]]
            )
        },
        {"guided_grammar": random.choice(GRAMMARS)},
        {"structured_outputs": {"json": schema(random, bodies)}},
        {"structured_outputs": {"regex": random.choice(REGEXES)}},
        {"structured_outputs": {"grammar": random.choice(GRAMMARS)}},
        {"structured_outputs": anything(random, bodies)},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": schema(random, bodies)},
            }
        },
        {"response_format": structural_tag(random, bodies)},
        {"response_format": {"type": text(random)}},
        {
            "json_schema": random.choice(
                ['{"type": "obj', "[]", "{", '"a"', "null", '{"$ref": "#"}', "[" * 5_000]
            )
        },
        {"regex": random.choice(REGEXES)},
        {"ebnf": random.choice(GRAMMARS)},
        {"structural_tag": random.choice(["{}", "[", '{"structures": [], "triggers": []}'])},
    ]
    chosen = dict(random.choice(made))
    if random.random() < 0.05:
        chosen |= random.choice(made)
    return chosen


def function(random: Random, bodies: Bodies) -> Any:
    """Return a function that a model might call."""
    named = {"name": random.choice(["f", "g", "h" * 128, "a b", "", text(random), 5, None])}
    more = {
        "parameters": schema(random, bodies),
        "strict": random.choice([True, False, None, "yes"]),
    }
    return named | more | random.choice([{}, {"description": text(random)}])


def tools(random: Random, bodies: Bodies) -> dict[str, Any]:
    """Return parameters about tools, as chats have them."""
    good = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    bad = {
        "type": random.choice(["function", "function", "web_search", None]),
        "function": function(random, bodies),
    }
    given = random.choice(
        [
            [good],
            [bad],
            [bad],
            [good, good],
            [good] * 513,
            [good, bad],
            [anything(random, bodies)],
            {},
        ]
    )
    chosen = random.choice(
        [
            "auto",
            "none",
            "required",
            "required",
            "sometimes",
            {"type": "function", "function": {"name": "f"}},
            {"type": "function", "function": {"name": "nope"}},
            {"type": "allowed_tools", "allowed_tools": {}},
            5,
            None,
        ]
    )
    return {
        "tools": given,
        "tool_choice": chosen,
        "parallel_tool_calls": random.choice([True, False, None, 1]),
    }
