"""worker.thoughts: how long an answer has thought, and when its budget closes the thought."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router.parser.families import MessageFormat, MessageParser
from worker.protocol import ThinkingBudget
from worker.thoughts import MAX_OVER, BudgetedThought, ThoughtTracker

OPEN, CLOSE = "<think>", "</think>"
# By number: tags as tokens, tags in pieces, spaces, and a character of three bytes in three tokens.
TOKENS = [
    *(text.encode() for text in (OPEN, CLOSE, "<", "think", ">", "</", "\n\n", "a", " b", ">\n")),
    *(bytes([byte]) for byte in "漢".encode()),
    b"",
    b"th",
    b"ink></think",
]
NUMBER = {token: number for number, token in enumerate(TOKENS)}
HAN = tuple(NUMBER[bytes([byte])] for byte in "漢".encode())


def ids(*texts: str) -> list[int]:
    return [NUMBER[text.encode()] for text in texts]


def tracked(tokens: list[int], *, is_open: bool = False) -> ThoughtTracker:
    tracker = ThoughtTracker(OPEN, CLOSE, is_open=is_open)
    for token_id in tokens:
        tracker.feed(TOKENS[token_id])
    return tracker


def budget(num_tokens: int, *closing: str, is_open: bool = False) -> ThinkingBudget:
    return ThinkingBudget(num_tokens, OPEN, CLOSE, tuple(ids(*(closing or (CLOSE,)))), is_open)


def answer(limit: ThinkingBudget, wanted: list[int]) -> list[int]:
    """Return the tokens of an answer that would say `wanted` if its budget let it."""
    thought = BudgetedThought(limit, TOKENS.__getitem__)
    said: list[int] = []
    while wanted or thought.forced is not None:
        is_wanted = bool(wanted) and thought.forced in (None, wanted[0])
        token_id = wanted.pop(0) if is_wanted else thought.forced
        assert token_id is not None, "nothing comes"
        thought.feed(token_id)
        said.append(token_id)
    return said


@pytest.mark.parametrize(
    ("tokens", "count", "is_open", "is_over"),
    [
        ([], 0, False, False),
        (ids("a", OPEN, "a"), 0, False, True),  # it begins with something else
        (ids("\n\n", OPEN), 0, True, False),
        (ids(OPEN, "a", " b"), 2, True, False),
        (ids(OPEN, "a", " b", CLOSE, "a"), 2, False, True),
        (ids(OPEN, CLOSE), 0, False, True),
        (ids("<", "think", ">"), 0, True, False),
        (ids("<", "think", ">\n", "a"), 2, True, False),  # the third says something, too
        (ids("<", "think", "a"), 0, False, True),
        (ids(OPEN, "a", "</", "think", ">"), 1, False, True),
        (ids(OPEN, "a", "</", "think", ">\n"), 1, False, True),
        (ids(OPEN, "a", "</", "think", "a"), 4, True, False),
        (ids(OPEN, "a", "</", "</", "think", ">", "a"), 2, False, True),
        ([NUMBER[b"<"], NUMBER[b"th"], NUMBER[b"ink></think"]], 1, True, False),
        ([NUMBER[b"<"], NUMBER[b"th"], NUMBER[b"ink></think"], NUMBER[b">"]], 0, False, True),
    ],
)
def test_tokens_of_a_thought_are_those_between_its_tags(
    tokens: list[int], count: int, is_open: bool, is_over: bool
) -> None:
    tracker = tracked(tokens)
    assert (tracker.num_tokens, tracker.is_open, tracker.is_over) == (count, is_open, is_over)


@pytest.mark.parametrize(
    ("tokens", "count", "is_open"),
    [
        ([], 0, True),
        (ids("a", " b"), 2, True),
        (ids("\n\n", "a", CLOSE), 2, False),
        (ids(CLOSE, "a"), 0, False),
        (ids(OPEN, "a"), 1, True),  # said again, the tag is a tag
        (ids("<", "think", ">", "a", CLOSE), 1, False),
        (ids("<", "think", "a"), 3, True),
        (ids("<", "a", "</", "think", ">"), 2, False),
    ],
)
def test_an_answer_may_begin_in_its_thought(tokens: list[int], count: int, is_open: bool) -> None:
    tracker = tracked(tokens, is_open=True)
    assert (tracker.num_tokens, tracker.is_open) == (count, is_open)


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=30), st.booleans())
def test_an_answer_thinks_as_long_as_its_parser_says(tokens: list[int], is_open: bool) -> None:
    form = MessageFormat(reasoning="qwen3", begins_in_thought=is_open)
    parser = MessageParser(form)
    text = b"".join(TOKENS[token_id] for token_id in tokens).decode(errors="replace")
    content = parser.feed(text, ends=True).content
    tracker = tracked(tokens, is_open=is_open)
    assert not (content and tracker.is_open)
    if tracker.is_over and not (is_open or CLOSE in text):
        assert content == text


@pytest.mark.parametrize("number", range(6))
def test_a_thought_is_closed_behind_its_budget(number: int) -> None:
    wanted = ids(OPEN, *["a"] * 5, CLOSE, " b")
    said = answer(budget(number), list(wanted))
    if number == 5:
        assert said == wanted  # the model closes it itself
    else:
        assert said[: number + 2] == ids(OPEN, *["a"] * number, CLOSE)
        assert said[number + 2 :] == wanted[number + 1 :]


def test_a_budget_of_nothing_closes_what_the_prompt_has_opened_at_once() -> None:
    assert answer(budget(0, is_open=True), ids("a")) == ids(CLOSE, "a")


def test_an_answer_without_a_thought_has_nothing_to_spend() -> None:
    wanted = ids("a", OPEN, "a", "a", "a")
    assert answer(budget(1), list(wanted)) == wanted


def test_a_tag_of_several_tokens_is_said_whole() -> None:
    limit = budget(2, "</", "think", ">")
    assert answer(limit, ids(OPEN, "a", "a", "a", " b")) == ids(
        OPEN, "a", "a", "</", "think", ">", "a", " b"
    )


def test_a_thought_is_not_closed_within_a_character() -> None:
    first, second, third = HAN
    wanted = [*ids(OPEN, "a"), *HAN, *ids("a")]
    for number in (2, 3, 4):
        said = answer(budget(number), list(wanted))
        assert said == [*ids(OPEN, "a"), *HAN, *ids(CLOSE, "a")]
    assert answer(budget(1), list(wanted)) == [*ids(OPEN, "a", CLOSE), *HAN, *ids("a")]
    # What is no character does not keep it open for ever.
    broken = [first, first, first, first, first]
    said = answer(budget(1), [*ids(OPEN), *broken])
    assert said[: MAX_OVER + 3] == [*ids(OPEN), *[first] * (1 + MAX_OVER), *ids(CLOSE)]
    assert second != third


def test_what_a_grammar_made_of_it_is_no_thought() -> None:
    thought = BudgetedThought(budget(1), TOKENS.__getitem__)
    for token_id in ids(OPEN, "a"):
        thought.feed(token_id)
    assert thought.forced == NUMBER[CLOSE.encode()]
    for token_id in ids("a", "a", "a"):
        thought.feed(token_id)
        assert thought.forced is None


@pytest.mark.parametrize("seed", range(200))
def test_a_state_made_again_behind_any_token_goes_on_in_the_same_way(seed: int) -> None:
    source = random.Random(seed)
    closing = source.choice(((CLOSE,), ("</", "think", ">")))
    limit = budget(source.randrange(6), *closing, is_open=source.random() < 0.5)
    wanted = [source.randrange(len(TOKENS)) for _ in range(20)]
    if source.random() < 0.5:
        wanted[0] = NUMBER[OPEN.encode()]
    said = answer(limit, wanted)
    for cut in range(len(said)):
        again = BudgetedThought(limit, TOKENS.__getitem__)
        for token_id in said[:cut]:
            again.feed(token_id)
        assert again.forced in (None, said[cut])
