"""The matcher for strangers' expressions agrees with Python's where both apply, and cannot hang."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.adapters.peft.pattern import Pattern
from cluster.adapters.peft.pattern_parser import PatternError

atoms = st.sampled_from(
    ["a", "b", "_", ".", r"\.", r"\d", r"\w", r"\W", "[ab]", "[^a]", "[a-c_]", r"[\d.]"]
    + ["^", "$", r"\b"]
)
repeats = st.sampled_from(["", "", "", "*", "+", "?", "*?", "{2}", "{1,}", "{,2}", "{0,3}"])


def wrap(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return expressions one level deeper."""
    groups = st.builds("({}){}".format, inner, repeats) | st.builds("(?:{})".format, inner)
    rows = st.lists(inner | groups, max_size=3).map("".join)
    return rows | st.builds("{}|{}".format, rows, rows)


# Anchors cannot be repeated; the others can.
single = st.builds(lambda a, r: a if a in ("^", "$", r"\b") else a + r, atoms, repeats)
expressions = st.recursive(single, wrap, max_leaves=8)


@given(expressions, st.lists(st.text("abc_.1 ", min_size=1, max_size=8), max_size=6))
def test_matches_are_those_of_python(text: str, subjects: list[str]) -> None:
    pattern = Pattern(text)
    for subject in subjects:
        assert pattern.fullmatch(subject) == (re.fullmatch(text, subject) is not None), subject


def test_nothing_repeated_over_and_over_is_still_nothing() -> None:
    text = "(" * 15 + "){100}" * 15
    assert Pattern(text + "ab").fullmatch("ab")
    assert not Pattern(f"(a{{0}}{text}b){{2}}").fullmatch("b")


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        (r".*\.(q|v)_proj", "model.layers.0.self_attn.v_proj"),
        (r"model\.layers\.([02]|1\d)\..*(mlp|self_attn)\.\w+_proj", "model.layers.17.mlp.up_proj"),
        (r"(?:.*?(?:layers).*?(?:self_attn).*?(?:q_proj))", "model.layers.0.self_attn.q_proj"),
        (r"^model\.layers\.\d{1,2}\.mlp\.up_proj$", "model.layers.3.mlp.up_proj"),
    ],
)
def test_expressions_that_people_write_are_understood(text: str, subject: str) -> None:
    assert Pattern(text).fullmatch(subject)
    assert not Pattern(text).fullmatch("model.layers.0.mlp.norm")


_PARTS = "self_attn|attention|attn|mixer|mlp|feed_forward|ffn|dense|mixer"
_LINEARS = "k_proj|q_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
_MORE = "per_layer_input_gate|per_layer_projection|linear|embedding_projection|relative_k_proj"
_BEHIND_LANGUAGE = rf"(?:.*?(?:language|text).*?(?:{_PARTS}).*?"
# What Unsloth has written into target_modules over its releases.
UNSLOTH = [
    rf"{_BEHIND_LANGUAGE}(?:{_LINEARS}).*?)"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{_PARTS})\.(?:(?:{_LINEARS})))",
    rf"{_BEHIND_LANGUAGE}(?:{_LINEARS}|{_MORE}))"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{_PARTS})\.(?:(?:{_LINEARS}|{_MORE})))",
    rf"{_BEHIND_LANGUAGE}\.(?:{_LINEARS}))"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}(?!.*\.experts\.\d)\..*?(?:{_PARTS}).*?\.(?:(?:{_LINEARS})))",
    rf".*?(?:{_PARTS}).*?(?:{_LINEARS}).*?",
]


@pytest.mark.parametrize("text", UNSLOTH)
@pytest.mark.parametrize("root", ["model.", "model.language_model.", "language_model.model."])
def test_expressions_of_unsloth_match_as_in_python(text: str, root: str) -> None:
    pattern = Pattern(text)
    paths = [f"{root}layers.{layer}.self_attn.{name}_proj" for layer in (0, 31) for name in "qkvo"]
    paths += [f"{root}layers.7.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert all(pattern.fullmatch(path) for path in paths)
    paths += [f"{root}embed_tokens", "lm_head", f"{root}layers.7.mlp.act_fn", f"x{paths[0]}"]
    for path in paths:
        assert pattern.fullmatch(path) == (re.fullmatch(text, path) is not None), path


@pytest.mark.parametrize(
    "text", ["(a+)+b", "(a|a)*b", "(a*)*(a*)*b", "(.*.*.*.*)*b", "a?" * 99 + "b"]
)
def test_expressions_that_make_a_backtracking_matcher_explode_are_matched(text: str) -> None:
    assert not Pattern(text).fullmatch("a" * 2000)
    assert Pattern(text).fullmatch("a" * 50 + "b")


@pytest.mark.parametrize(
    "text",
    [
        *("(a", "a)", "[a", "[]", "*a", "a**", "a*+", "a{2}{2}", "a{", "a{x}", "a{3,1}", "a{1000}"),
        *(
            r"(a)\1",
            r"\B",
            r"\b*",
            r"[\b]",
            r"\Z",
            "(?=a)",
            "(?!a)",
            "(?<=a)",
            "(?i)a",
            "(?P<x>a)",
            "^*",
            "a\\",
            "ä",
        ),
        *("[b-a]", r"[\d-z]", "a" * 2049, "(" * 99 + ")" * 99, "((a{99}){99}){99}", "]", "}"),
    ],
)
def test_what_is_outside_the_subset_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        Pattern(text)


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@given(st.text("ab.*+?()[]{}|^$\\-,:12", max_size=40))
def test_any_text_is_compiled_or_refused(text: str) -> None:
    try:
        pattern = Pattern(text)
    except PatternError:
        return
    assert pattern.fullmatch("ab") == (re.fullmatch(text, "ab") is not None)
