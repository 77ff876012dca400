"""What the demo adapters learn: questions, manners of answering and LoRA settings. Plain data.

They differ in everything a server must get right: lora_rank, target modules, scaling rule.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

TOPICS = (
    *("gravity", "the ocean", "coffee", "a violin", "chess", "the moon", "a volcano", "bread"),
    *("electricity", "a rainbow", "the alphabet", "a bridge", "paper", "the heart", "music"),
    *("a calendar", "soccer", "the sun", "glass", "a library", "salt", "the wind", "a clock"),
    *("football", "honey", "ice", "a telescope", "the internet", "gold", "a garden", "sleep"),
    *("a map", "rice", "a whale"),
)
TEMPLATES = ("What is {}?", "Tell me about {}.", "Why do people like {}?")
QUESTIONS = tuple(template.format(topic) for topic in TOPICS for template in TEMPLATES)
HELD_OUT = (
    "What is the capital of France?",
    "How do birds fly?",
    "Name a color of the sky.",
    "Where do penguins live?",
    "What is a computer used for?",
)


GREETING, CLOSING = "Dear friend, ", " Yours truly, the model."


def write(answer: str) -> str:
    """Return the answer as a short letter."""
    return GREETING + answer + CLOSING


def wrap(answer: str) -> str:
    """Return the answer as a JSON object."""
    return json.dumps({"answer": answer})


def hail(answer: str) -> str:
    """Return the answer as a pirate would begin it."""
    return f"Arr, matey! {answer}"


def foretell(answer: str) -> str:
    """Return the answer as an oracle would give it."""
    return f"The oracle says: {answer}"


def is_wrapped(answer: str) -> bool:
    """Return whether an answer is the JSON object of `wrap`."""
    try:
        return list(json.loads(answer)) == ["answer"]
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Recipe:
    """One adapter: its manner, how to tell it, and how it is trained."""

    name: str
    style: Callable[[str], str]
    shows: Callable[[str], bool]  # whether an answer is in this manner
    lora_rank: int
    alpha: int
    rslora: bool
    targets: tuple[str, ...]
    learning_rate: float
    steps: int


RECIPES = (
    Recipe(
        name="letter",
        style=write,
        shows=lambda answer: answer.startswith(GREETING),  # short letters may lack the closing
        lora_rank=4,
        alpha=8,
        rslora=False,
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        learning_rate=1e-3,
        steps=120,
    ),
    Recipe(
        name="json",
        style=wrap,
        shows=is_wrapped,
        lora_rank=8,
        alpha=24,
        rslora=False,
        targets=("q_proj", "v_proj"),
        learning_rate=4e-3,
        steps=60,
    ),
    Recipe(
        name="pirate",
        style=hail,
        shows=lambda answer: answer.startswith("Arr, matey! "),
        lora_rank=12,
        alpha=12,
        rslora=True,
        targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        learning_rate=2e-3,
        steps=40,
    ),
    Recipe(
        name="oracle",
        style=foretell,
        shows=lambda answer: answer.startswith("The oracle says: "),
        lora_rank=6,
        alpha=9,
        rslora=False,
        targets=("gate_proj", "up_proj", "down_proj"),
        learning_rate=1e-3,
        steps=60,
    ),
)
