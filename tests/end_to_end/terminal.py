"""A terminal that a command runs in, as a person has one."""

import os
import pty
import re
import subprocess
import termios
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.end_to_end.asking import wait_for
from tests.end_to_end.server import Server, serve_command
from tests.patience import PATIENCE
from tests.ports import free_port

_WRITTEN = re.compile(r"\x1b\[(?P<number>[?\d;]*)(?P<control>[A-Za-z])|(?P<text>.)", re.DOTALL)


class Terminal:
    """Runs a command in a session of its own whose terminal this is; nobody else reads it."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._master, self._slave = pty.openpty()
        termios.tcsetwinsize(self._slave, (50, 200))
        # The terminal that the first process of a session opens becomes that session's.
        script = 'exec "$@" <"$0" >"$0" 2>&1'
        self.process = subprocess.Popen(
            ["sh", "-c", script, os.ttyname(self._slave), *command],
            env={**environment, "TERM": "xterm"},
            start_new_session=True,
        )
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._master, 65536)
            except OSError:  # nobody has the terminal open any more
                return

    def press_ctrl_c(self) -> None:
        """Let the kernel interrupt all processes of the foreground, as it does for a keyboard."""
        os.write(self._master, b"\x03")

    def type(self, text: str) -> None:
        """Type a text, as a keyboard sends it."""
        os.write(self._master, text.encode())

    def press_ctrl_d(self) -> None:
        """End what is read from here; nothing may be typed yet in the line."""
        os.write(self._master, b"\x04")

    def wait(self) -> int:
        """Return the exit code of the command when it and all that writes here have ended."""
        code = self.process.wait(PATIENCE)
        os.close(self._slave)
        self._reader.join(PATIENCE)
        assert not self._reader.is_alive(), "somebody still has the terminal open"
        os.close(self._master)
        return code

    @property
    def written(self) -> str:
        """All that was ever written, control sequences and what was wiped out again among it."""
        return self._written.decode()

    def screen(self) -> list[str]:
        """Return the lines that a person sees, without empty ones at the end."""
        lines, row, column = [""], 0, 0
        for token in _WRITTEN.finditer(self.written):
            number, control, text = token["number"], token["control"], token["text"]
            if control == "A":
                row -= int(number or 1)
            elif control == "K":
                assert number == "2", f"an unknown control sequence: {token[0]!r}"
                lines[row] = ""
            elif control is not None:
                assert control in "mhl", f"an unknown control sequence: {token[0]!r}"
            elif text == "\r":
                column = 0
            elif text == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            else:
                lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + 1 :]
                column += 1
        return "\n".join(line.rstrip() for line in lines).rstrip("\n").split("\n")


class ServerInTerminal(Server):
    """`topwork serve` as a person starts it, who ends it by Ctrl-C."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = serve_command(self.port, *flags)
        self.terminal = Terminal(command, {**os.environ, "OMP_NUM_THREADS": ""})
        self.process = self.terminal.process

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.terminal.written
            return "Ctrl-C takes it down" in self.terminal.written

        wait_for(is_ready, lambda: self.terminal.written)

    def stop(self) -> None:
        self.terminal.press_ctrl_c()
        self.terminal.wait()
