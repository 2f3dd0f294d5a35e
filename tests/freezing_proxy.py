"""A TCP proxy in front of a server, which freezes: it takes what comes and passes nothing on."""

import selectors
import socket
import threading
from contextlib import suppress
from types import TracebackType


class FreezingProxy:
    """Listens on a port of the loopback interface while the block lasts.

    Args:
        target: A TCP address, or the path of a unix socket.
    """

    def __init__(self, target: tuple[str, int] | str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._frozen = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> "FreezingProxy":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()

    def freeze(self) -> None:
        """Pass nothing on any more; connections are taken by the kernel and never answered."""
        self._frozen.set()

    def thaw(self) -> None:
        """Go on with what has come meanwhile."""
        self._frozen.clear()

    def _run(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stop.is_set():
                if self._frozen.is_set():
                    self._stop.wait(0.02)
                    continue
                for key, _ in selector.select(0.02):
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready is self._listener:
                        near, far = self._listener.accept()[0], self._connect()
                        other |= {near: far, far: near}
                        selector.register(near, selectors.EVENT_READ)
                        selector.register(far, selectors.EVENT_READ)
                    elif ready in other:
                        self._pass_on(ready, other, selector)
        for end in other:
            end.close()

    def _connect(self) -> socket.socket:
        if isinstance(self._target, tuple):
            return socket.create_connection(self._target)
        far = socket.socket(socket.AF_UNIX)
        far.connect(self._target)
        return far

    @staticmethod
    def _pass_on(
        ready: socket.socket,
        other: dict[socket.socket, socket.socket],
        selector: selectors.BaseSelector,
    ) -> None:
        data = b""
        with suppress(OSError):
            data = ready.recv(65_536)
        if data:
            with suppress(OSError):
                other[ready].sendall(data)
            return
        for end in (other.pop(ready), ready):
            other.pop(end, None)
            selector.unregister(end)
            end.close()
