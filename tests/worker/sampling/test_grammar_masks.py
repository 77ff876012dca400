"""worker.sampling.grammar_masks: masks behind exactly the tokens that are known."""

import threading
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
from llguidance import LLMatcher

from tests.end_to_end.server import MODEL_DIR
from tests.patience import PATIENCE
from worker.grammar import GrammarState, GrammarVocabulary
from worker.sampling.grammar_masks import GrammarMasks
from worker.token_mask import Mask, allowed_tokens, allows

pytestmark = pytest.mark.model

YES_OR_NO = 'start: "yes" | "no"'
NAME = LLMatcher.grammar_from_json_schema(
    {"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]},
    defaults={"whitespace_flexible": False},
)
LISTS = 'start: "[" (one ("," one)*)? "]"\none: /[a-z]{1,5}/ | "a longer text" | start'
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(MODEL_DIR, 49152, (2,))


@pytest.fixture
def masks(vocabulary: GrammarVocabulary) -> Iterator[GrammarMasks]:
    made = GrammarMasks(lambda: vocabulary)
    yield made
    made.close()


def test_a_mask_is_of_the_grammar_behind_what_was_fed(
    masks: GrammarMasks, vocabulary: GrammarVocabulary
) -> None:
    masks.start(1, YES_OR_NO)
    first = masks.mask(1)
    assert np.array_equal(first, vocabulary.state(YES_OR_NO).allowed())
    (no,) = vocabulary.tokenizer.tokenize_str("no")
    assert allows(first, no)
    assert masks.sampled(1, 0, no) == (2,)
    assert allowed_tokens(masks.mask(1)).tolist() == [2]


def test_tokens_are_fed_once_however_often_they_are_told(
    masks: GrammarMasks, vocabulary: GrammarVocabulary
) -> None:
    forced = vocabulary.state(NAME).forced
    masks.start(1, NAME)
    rest = masks.sampled(1, 0, forced[0])
    assert rest == forced[1:]
    assert masks.sampled(1, 0, forced[0]) == rest
    known = [*PROMPT, *forced]
    masks.feed(1, known, len(PROMPT))
    masks.feed(1, known, len(PROMPT))
    assert np.array_equal(masks.mask(1), vocabulary.state(NAME, forced).allowed())


def test_a_sequence_that_comes_back_goes_on_behind_its_output(
    masks: GrammarMasks, vocabulary: GrammarVocabulary
) -> None:
    forced = vocabulary.state(NAME).forced
    masks.start(1, NAME)
    masks.feed(1, [*PROMPT, *forced], len(PROMPT))
    masks.end(1)
    masks.end(1)  # one that was never followed
    masks.start(1, NAME)
    masks.feed(1, [*PROMPT, *forced], len(PROMPT))
    assert np.array_equal(masks.mask(1), vocabulary.state(NAME, forced).allowed())


def test_sequences_of_one_grammar_do_not_touch_each_other(
    masks: GrammarMasks, vocabulary: GrammarVocabulary
) -> None:
    (no,) = vocabulary.tokenizer.tokenize_str("no")
    for seq_id in (1, 2):
        masks.start(seq_id, YES_OR_NO)
    masks.sampled(1, 0, no)
    assert not allows(masks.mask(1), no)
    assert allows(masks.mask(2), no)


def test_of_a_sequence_that_comes_back_with_its_tokens_one_mask_is_computed(
    masks: GrammarMasks, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[GrammarState] = []
    allowed = GrammarState.allowed

    def noting(state: GrammarState) -> Mask:
        computed.append(state)
        return allowed(state)

    monkeypatch.setattr(GrammarState, "allowed", noting)
    (no,) = vocabulary.tokenizer.tokenize_str("no")
    masks.start(1, YES_OR_NO)
    masks.feed(1, [*PROMPT, no], len(PROMPT))
    assert allowed_tokens(masks.mask(1)).tolist() == [2]
    assert len(computed) == 1


def test_a_mask_that_a_step_waits_for_is_counted(vocabulary: GrammarVocabulary) -> None:
    gate = threading.Event()

    def load() -> GrammarVocabulary:
        gate.wait(PATIENCE)
        return vocabulary

    masks = GrammarMasks(load)
    masks.start(1, YES_OR_NO)
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    assert masks.mask(1).any()
    opener.join()
    assert masks.num_late == 1
    assert masks.mask(1).any()
    assert masks.num_late == 1
    masks.close()


@pytest.fixture
def gated(vocabulary: GrammarVocabulary) -> Iterator[tuple[GrammarMasks, threading.Event]]:
    """Masks whose vocabulary, and so every grammar, is not there before the gate is open."""
    gate = threading.Event()

    def load() -> GrammarVocabulary:
        gate.wait(PATIENCE)
        return vocabulary

    made = GrammarMasks(load)
    yield made, gate
    gate.set()
    made.close()


def test_a_step_that_does_not_draw_waits_for_no_grammar(
    gated: tuple[GrammarMasks, threading.Event], vocabulary: GrammarVocabulary
) -> None:
    masks, gate = gated
    forced = vocabulary.state(NAME).forced
    masks.start(1, NAME)
    masks.feed(1, PROMPT, len(PROMPT))  # would not return
    masks.feed(1, [*PROMPT, *forced], len(PROMPT))  # of one that comes back
    gate.set()
    assert np.array_equal(masks.mask(1), vocabulary.state(NAME, forced).allowed())
    assert masks.error(1) == ""


def test_a_grammar_is_compiled_before_a_sequence_follows_it(
    gated: tuple[GrammarMasks, threading.Event], vocabulary: GrammarVocabulary
) -> None:
    masks, gate = gated
    fresh = 'start: "compiled" | "beforehand"'
    assert not masks.prepare(fresh, 0.0)
    assert not masks.prepare(fresh, 0.0)
    assert fresh not in vocabulary._compiled
    gate.set()
    assert masks.prepare(fresh, PATIENCE)
    assert fresh in vocabulary._compiled
    assert masks.prepare(fresh, PATIENCE)
    assert masks.prepare("start: missing", PATIENCE)


@pytest.mark.parametrize("seed", range(12))
def test_in_whatever_order_tokens_become_known_the_rest_is_that_of_the_grammar(
    masks: GrammarMasks, vocabulary: GrammarVocabulary, seed: int
) -> None:
    random = Random(seed)
    fresh = f"{LISTS} // {seed}"  # is compiled while tokens are fed
    output: list[int] = []
    masks.start(1, fresh)
    while not output or (output[-1] != 2 and len(output) < 60):
        expected = vocabulary.state(LISTS, output)
        known = [*PROMPT, *output]
        if random.random() < 0.2:  # preempted, and back
            masks.end(1)
            masks.start(1, fresh)
        masks.feed(1, known[: random.randint(0, len(known))], len(PROMPT))
        masks.feed(1, known, len(PROMPT))
        if random.random() < 0.5:
            assert np.array_equal(masks.mask(1), expected.allowed())
        token_id = int(random.choice(allowed_tokens(expected.allowed())))
        output.append(token_id)
        if random.random() < 0.3:  # a step that was planned ahead knows it first
            masks.feed(1, [*PROMPT, *output], len(PROMPT))
        expected.feed(token_id)
        assert masks.sampled(1, len(output) - 1, token_id) == expected.forced
        assert masks.error(1) == expected.error == ""
