"""A TCP proxy in front of a server, which cuts connections in the middle of what they carry."""

import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

_PIECE_BYTES = 4_096
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, what was not sent is lost


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a connection ends: after so many bytes to the server, or so many of its answer.

    reset: By a reset instead of an orderly end.
    """

    sent: int | None = None
    answered: int | None = None
    reset: bool = False


class CuttingProxy:
    """Listens on the loopback interface; each connection takes the next cut, then all are whole.

    Args:
        port: Where the server listens on this machine.
        cuts: One for each of the first connections.
    """

    def __init__(self, port: int, *cuts: Cut) -> None:
        self._target = port
        self._cuts = list(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def cuts_left(self) -> int:
        """How many cuts no connection has taken yet."""
        return len(self._cuts)

    def cut_next(self, *cuts: Cut) -> None:
        """Cut the next new connections; those that are open now end."""
        self._cuts += cuts
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "CuttingProxy":
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Wakes the thread that accepts, which a close alone does not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            cut = self._cuts.pop(0) if self._cuts else Cut()
            far = socket.create_connection(("127.0.0.1", self._target))
            self._ends += [near, far]
            for source, sink, most in ((near, far, cut.sent), (far, near, cut.answered)):
                thread = threading.Thread(
                    target=_pass_on, args=(source, sink, most, (near, far), cut.reset), daemon=True
                )
                self._threads.append(thread)
                thread.start()


def _pass_on(
    source: socket.socket,
    sink: socket.socket,
    most: int | None,
    both: tuple[socket.socket, socket.socket],
    reset: bool,
) -> None:
    """Pass bytes on until the connection ends, or until `most` of them have passed."""
    passed = 0
    with suppress(OSError):
        while most is None or passed < most:
            room = _PIECE_BYTES if most is None else min(_PIECE_BYTES, most - passed)
            piece = source.recv(room)
            if not piece:
                break
            sink.sendall(piece)
            passed += len(piece)
    for end in both:
        with suppress(OSError):
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            end.shutdown(socket.SHUT_RDWR)
