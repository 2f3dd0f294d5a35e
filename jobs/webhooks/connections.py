"""Connections to addresses that were checked, with one deadline for all that they do."""

import ssl
import time
from collections.abc import Iterable, Sequence
from typing import Any

import httpcore

_CONNECT_S = 5.0  # to one address, where the host has several


class CheckedBackend(httpcore.NetworkBackend):
    """Connects to given addresses, whatever host it is asked for.

    The host of the URL stays the name in TLS and in the header `Host`.
    """

    def __init__(self, addresses: Sequence[str], deadline: float) -> None:
        self._addresses = addresses
        self._deadline = deadline
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address that answers; raises httpcore.ConnectError."""
        failure: httpcore.NetworkError | httpcore.TimeoutException | None = None
        for address in self._addresses:
            try:
                left_s = min(_CONNECT_S, _left_s(self._deadline, httpcore.ConnectTimeout))
                stream = self._backend.connect_tcp(address, port, timeout=left_s)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
                continue
            return _TimedStream(stream, self._deadline)
        raise failure or httpcore.ConnectError("there is no address")


class _TimedStream(httpcore.NetworkStream):
    """A stream whose reads and writes end at one moment: a slow answer gains no time by pieces."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(self._deadline, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left_s(self._deadline, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(self._deadline, httpcore.ConnectTimeout)
        secured = self._stream.start_tls(ssl_context, server_hostname, left_s)
        return _TimedStream(secured, self._deadline)

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401 - as httpcore has it
        return self._stream.get_extra_info(info)


def _left_s(deadline: float, late: type[httpcore.TimeoutException]) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise late("the time for the whole attempt is over")
    return left_s
