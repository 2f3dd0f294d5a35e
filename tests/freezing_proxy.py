"""A TCP proxy in front of a server, which freezes: it takes what comes and passes nothing on."""

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from sqlalchemy.engine import make_url


class FreezingProxy:
    """Listens on a port of the loopback interface while the block lasts.

    Args:
        target: A TCP address, or the path of a unix socket; may be changed until it is needed.
    """

    def __init__(self, target: tuple[str, int] | str) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._frozen = threading.Event()
        self._freezes_after: bytes | None = None
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

    def freeze_after(self, words: bytes) -> None:
        """Freeze as soon as these words have been passed on, in one piece, to the server."""
        self._freezes_after = words

    @property
    def is_frozen(self) -> bool:
        """Whether nothing is passed on."""
        return self._frozen.is_set()

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
                    if self._frozen.is_set():
                        break
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
        if isinstance(self.target, tuple):
            return socket.create_connection(self.target)
        far = socket.socket(socket.AF_UNIX)
        far.connect(self.target)
        return far

    def _pass_on(
        self,
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
            if self._freezes_after is not None and self._freezes_after in data:
                self._freezes_after = None
                self.freeze()
            return
        for end in (other.pop(ready), ready):
            other.pop(end, None)
            selector.unregister(end)
            end.close()


@contextmanager
def proxied_postgres(url: str) -> Iterator[tuple[FreezingProxy, str]]:
    """A proxy in front of a PostgreSQL, and the URL that leads through it."""
    direct = make_url(url)
    folder = direct.query.get("host", direct.host)
    assert isinstance(folder, str)
    port = int(str(direct.query.get("port", direct.port or 5432)))
    target = f"{folder}/.s.PGSQL.{port}" if folder.startswith("/") else (folder, port)
    with FreezingProxy(target) as proxy:
        through = direct.set(host="127.0.0.1", port=proxy.port)
        through = through.difference_update_query(["host", "port"])
        yield proxy, through.render_as_string(hide_password=False)
