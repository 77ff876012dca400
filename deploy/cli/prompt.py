"""The terminal of `topwork chat`: reads turns and commands, prints answers as they come."""

import sys
from collections.abc import Iterator
from contextlib import closing

from deploy.cli.client import CallError
from deploy.cli.conversation import Conversation
from deploy.cli.output import say_error, say_note

HELP = """/model NAME  ask another model or adapter from now on; without a name: list them
/reset       forget the conversation
/help        this
Ctrl-C stops an answer, Ctrl-D ends."""


def answer_all(conversation: Conversation, *, is_terminal: bool) -> None:
    """Answer turns until there are no more.

    Raises:
        CallError: where no person is asked what to do next: the first call that fails.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # of halves of characters
    if not is_terminal:
        for line in sys.stdin:
            _take(conversation, line.strip())
        return
    print(f"{conversation.model} answers; /help lists what else can be typed.")
    for line in _typed(conversation):
        try:
            _take(conversation, line.strip())
        except CallError as error:
            say_error(str(error))
        except KeyboardInterrupt:
            print()


def _typed(conversation: Conversation) -> Iterator[str]:
    """Yield what a person types, until Ctrl-D."""
    import readline  # noqa: F401 - lets `input` edit and remember lines

    while True:
        try:
            line = input(f"{conversation.model}> ")
        except KeyboardInterrupt:
            print()
            say_note("Ctrl-D ends")
        except EOFError:
            print()
            return
        else:
            yield line


def _take(conversation: Conversation, line: str) -> None:
    """Do what a line says."""
    if not line:
        return
    if not line.startswith("/"):
        with closing(conversation.ask(line)) as answer:
            _print_answer(answer)
        return
    command, _, rest = line.partition(" ")
    if command == "/model" and rest:
        conversation.use(rest.strip())
    elif command == "/model":
        print("\n".join(map(_printable, conversation.models())))
    elif command == "/reset":
        conversation.reset()
    elif command == "/help":
        print(HELP)
    else:
        raise CallError(f"{_printable(command)}: there is no such command; /help lists them")


def _print_answer(answer: Iterator[str]) -> None:
    is_terminal = sys.stdout.isatty()
    for text in answer:
        sys.stdout.write(_printable(text) if is_terminal else text)
        sys.stdout.flush()
    print()


def _printable(text: str) -> str:
    """Return a text without what could take the terminal over."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
