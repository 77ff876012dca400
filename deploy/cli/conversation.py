"""A conversation with a server: its turns, its model, and how both change.

It neither reads nor prints: deploy.cli.prompt does.
"""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from deploy.cli.client import CallError, Client
from deploy.cli.connection import path_of


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked with every turn; None: as the server has it."""

    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


class Conversation:
    """Turns so far, sent again with each new one."""

    def __init__(self, client: Client, settings: Settings) -> None:
        """Begin a conversation.

        Raises:
            CallError: if the server is not there, or has no such model.
        """
        self._client = client
        self._settings = settings
        self._turns: list[dict[str, str]] = []
        self.model = ""
        if settings.model is None:
            self.model = self.models()[0]
        else:
            self.use(settings.model)

    def models(self) -> list[str]:
        """Return the names that can be asked, the base model's first; raises as `ask`."""
        listed = self._client.get("/v1/models")
        try:
            names = [str(card["id"]) for card in listed["data"]]
        except (KeyError, TypeError):
            names = []
        if not names:
            raise CallError(f"{self._client.url}: no list of models: is that a Topwork server?")
        return names

    def use(self, model: str) -> None:
        """Ask another model or adapter from now on; raises CallError if it cannot be asked."""
        self._client.get(path_of("v1", "models", model))
        self.model = model

    def reset(self) -> None:
        """Forget all turns."""
        self._turns.clear()

    def ask(self, text: str) -> Generator[str, None, None]:
        """Stream the answer to a turn; closing it ends the call.

        The turn stays, with as much of its answer as was heard, unless that is nothing or the
        call has failed.

        Raises:
            CallError: if it fails.
        """
        turn = {"role": "user", "content": text}
        heard: list[str] = []
        with closing(self._client.chat(self._body(turn))) as answer:
            try:
                for delta in answer:
                    heard.append(delta)
                    yield delta
            except CallError:
                heard.clear()
                raise
            finally:
                if heard:
                    self._turns += [turn, {"role": "assistant", "content": "".join(heard)}]

    def _body(self, turn: dict[str, str]) -> dict[str, Any]:
        settings = self._settings
        system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        asked = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
        return {
            "model": self.model,
            "messages": [*system, *self._turns, turn],
            **{name: value for name, value in asked.items() if value is not None},
        }
