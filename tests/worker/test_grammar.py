"""worker.grammar: what may come next depends on the grammar and the output alone."""

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

import worker.grammar
from tests.end_to_end.server import MODEL_DIR
from worker.grammar import NUM_KEPT, GrammarState, GrammarVocabulary
from worker.token_mask import allowed_tokens, allows, num_allowed

pytestmark = pytest.mark.model

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(MODEL_DIR, 49152, (EOS,))


def grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})


def drawn(state: GrammarState, random: Random) -> list[int]:
    """Return tokens drawn at random to the end, of which the last ends the answer."""
    tokens: list[int] = []
    while not tokens or tokens[-1] != EOS:
        token_id = int(random.choice(allowed_tokens(state.allowed())))
        state.feed(token_id)
        tokens.append(token_id)
    return tokens


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_is_valid(vocabulary: GrammarVocabulary, seed: int) -> None:
    tokens = drawn(vocabulary.state(grammar(PERSON)), Random(seed))
    answer = json.loads(vocabulary.tokenizer.decode_bytes(tokens[:-1]))
    jsonschema.validate(answer, PERSON)


@pytest.mark.parametrize("seed", range(5))
def test_a_state_made_again_behind_any_token_goes_on_in_the_same_way(
    vocabulary: GrammarVocabulary, seed: int
) -> None:
    state = vocabulary.state(grammar(PERSON))
    tokens = drawn(vocabulary.state(grammar(PERSON)), Random(seed))
    for count, token_id in enumerate(tokens):
        again = vocabulary.state(grammar(PERSON), tokens[:count])
        assert again.forced == state.forced
        assert np.array_equal(again.allowed(), state.allowed())
        state.feed(token_id)


def test_what_is_certain_is_forced_one_token_after_the_other(
    vocabulary: GrammarVocabulary,
) -> None:
    state = vocabulary.state(grammar(PERSON))
    forced = state.forced
    assert vocabulary.tokenizer.decode_str(list(forced)) == '{"name'
    for index, token_id in enumerate(forced):
        assert allowed_tokens(state.allowed()).tolist() == [token_id]
        assert state.forced == forced[index:]
        state.feed(token_id)


def test_the_token_that_ends_the_answer_is_forced_when_nothing_else_can_follow(
    vocabulary: GrammarVocabulary,
) -> None:
    state = vocabulary.state('start: "yes"')
    for token_id in state.forced:
        state.feed(token_id)
    assert state.forced == (EOS,)


def test_a_token_that_may_end_the_answer_is_one_of_several_where_more_may_follow(
    vocabulary: GrammarVocabulary,
) -> None:
    state = vocabulary.state(LLMatcher.grammar_from_regex("a+"))
    assert not allows(state.allowed(), EOS)
    state.feed(vocabulary.tokenizer.tokenize_str("a")[0])
    assert allows(state.allowed(), EOS)
    assert num_allowed(state.allowed()) > 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (grammar({"type": "bogus"}), "bogus"),
        (grammar({"not": {"type": "string"}}), "not"),
        (LLMatcher.grammar_from_regex("(a"), "invalid regex"),
        ("start: missing", "unknown name"),
        ("", ""),
        ("{" * 5000, ""),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_told_with_the_reason(
    vocabulary: GrammarVocabulary, text: str, reason: str
) -> None:
    mistake = vocabulary.mistake(text)
    assert mistake
    assert reason in mistake


def test_a_fine_grammar_has_no_mistake(vocabulary: GrammarVocabulary) -> None:
    assert vocabulary.mistake(grammar(PERSON)) == ""


def test_a_grammar_that_becomes_too_complex_allows_nothing_and_says_why(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.grammar, "_LIMITS", LLParserLimits(step_max_items=3))
    state = vocabulary.state(grammar({"type": "object", "title": "with other limits"}))
    assert not state.allowed().any()
    assert "Too many items" in state.error
    assert not state.allowed().any()
    assert state.forced == ()


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> GrammarVocabulary:
    """The demo model's tokens, and `<think>` as a token that is not called special."""
    loaded = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    loaded["added_tokens"].append(plain | {"id": 49152, "content": "<think>", "special": False})
    model_dir = tmp_path_factory.mktemp("thinking")
    (model_dir / "tokenizer.json").write_text(json.dumps(loaded))
    return GrammarVocabulary(model_dir, 49160, (EOS,))


@pytest.mark.parametrize("text", ["<|im_end|>", "<think>", "a <|im_start|> and <|im_end|>!"])
@pytest.mark.parametrize("form", [{"const": "%s"}, {"enum": ["%s", "x"]}, {"pattern": "^%s$"}])
def test_a_text_that_spells_a_special_token_is_said_in_ordinary_ones(
    thinking: GrammarVocabulary, form: dict[str, Any], text: str
) -> None:
    spelled = json.loads(json.dumps(form).replace("%s", text.replace("|", r"\\|")))
    if "pattern" not in form:
        spelled = json.loads(json.dumps(form).replace("%s", text))
    schema = {"type": "object", "properties": {"a": {"type": "string"} | spelled}}
    whole = grammar(schema | {"required": ["a"], "additionalProperties": False})
    wanted = thinking.tokenizer.tokenize_str(json.dumps({"a": text}, separators=(",", ":")))
    assert not any(map(thinking.tokenizer.is_special_token, wanted))
    state = thinking.state(whole)
    for token_id in (*wanted, EOS):
        assert allows(state.allowed(), token_id)
        state.feed(token_id)
    answer = thinking.state(whole)
    tokens = drawn(answer, Random(0))
    assert json.loads(thinking.tokenizer.decode_str(tokens[:-1]))["a"] in (text, "x")
    assert answer.error == ""


def test_a_special_token_that_a_grammar_names_is_that_token(thinking: GrammarVocabulary) -> None:
    assert thinking.state("start: <think>").forced == (49152,)
    assert thinking.state("start: <[49152]>").forced == (49152,)
    assert thinking.state('start: "<think>"').forced != (49152,)


def test_only_the_grammars_used_last_are_kept(vocabulary: GrammarVocabulary) -> None:
    for number in range(NUM_KEPT + 5):
        vocabulary.state(f'start: "{number}"')
    assert len(vocabulary._compiled) == NUM_KEPT
