"""A program in a terminal of its own, and what the terminal was sent."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"
"""What a program sends to take the whole screen, and to give it back as it was."""
PATIENCE_S = 60.0


@dataclass
class Terminal:
    """The near end of a terminal, and the program in it."""

    program: subprocess.Popen[bytes]
    _near: int
    _sent: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        """All that came so far."""
        return self._sent.decode(errors="replace")

    def wait_for(self, text: str, after: int = 0) -> int:
        """Read until `text` has come behind the character `after`; returns where it ends."""
        deadline = time.monotonic() + PATIENCE_S
        while (at := self.text.find(text, after)) < 0:
            if not self._read() or time.monotonic() > deadline:
                raise AssertionError(f"the terminal never got {text!r}: {self.text[-2_000:]!r}")
        return at + len(text)

    def end(self, signal_number: int) -> int:
        """Send the signal, read to the end, and return the exit status."""
        self.program.send_signal(signal_number)
        while self._read():
            pass
        return self.program.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Take what comes within a second; False at the end."""
        ready, _, _ = select.select([self._near], [], [], 1.0)
        with suppress(OSError):  # Linux says so where the program has ended
            if not ready:
                return self.program.poll() is None
            piece = os.read(self._near, 65_536)
            self._sent += piece
            return bool(piece)
        return False


@contextmanager
def in_terminal(
    command: Sequence[str], columns: int, lines: int, environment: Mapping[str, str]
) -> Iterator[Terminal]:
    """Run a program in a terminal of that size until the block ends."""
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    named = {"TERM": "xterm-256color", **environment}
    named = {name: value for name, value in named.items() if name not in ("COLUMNS", "LINES")}
    program = subprocess.Popen(command, stdin=far, stdout=far, stderr=far, env=named)
    os.close(far)
    try:
        yield Terminal(program, near)
    finally:
        program.kill()
        program.wait()
        os.close(near)
