"""What both clients are made of: the address, the key, and the sending of an upload."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from nightjar.pipeline.client.errors import ClientError, RequestError
from nightjar.pipeline.client.frames import FrameReader
from nightjar.pipeline.client.options import SubmitOptions, check_options
from nightjar.pipeline.client.sources import Frame, Lines, Source, one_or_many
from nightjar.pipeline.client.steps import Asking, Call
from nightjar.pipeline.client.uploads import Spool, Upload, file_upload

DEFAULT_API = "http://127.0.0.1:8000"
DEFAULT_RETRIES = 5
DEFAULT_TIMEOUT_S = 30.0
_UPLOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Connecting:
    """How a client reaches the API.

    Args:
        api_url: Where `nightjar api` listens; None means NIGHTJAR_API, or port 8000 of this host.
        api_key: The key that is sent; None means that of NIGHTJAR_API_KEY, if there is one.
        retries: How often a call is tried again.
        timeout_s: How long the API may be silent; an upload may take longer.
    """

    api_url: str | None
    api_key: str | None
    retries: int
    timeout_s: float

    def asking(self) -> Asking:
        """Return how calls are asked."""
        return Asking(self._url().rstrip("/"), self.retries)

    def http_options(self) -> dict[str, Any]:
        """Return the options of httpx's client; raises ClientError for an unusable key."""
        key = self.api_key or os.environ.get("NIGHTJAR_API_KEY")
        return {
            "base_url": self._url(),
            "timeout": self.timeout_s,
            "headers": _authorization(key),
        }

    def call_options(self, call: Call) -> dict[str, Any]:
        """Return the options of one request of httpx, all but its content."""
        options: dict[str, Any] = {"params": dict(call.query), "headers": dict(call.headers)}
        if call.upload is not None:
            options["headers"]["Content-Length"] = str(call.upload.size)
            options["timeout"] = httpx.Timeout(
                self.timeout_s, read=_UPLOAD_TIMEOUT_S, write=_UPLOAD_TIMEOUT_S
            )
        return options

    def unusable(self, error: httpx.InvalidURL) -> ClientError:
        """Return what to raise where httpx refuses the address."""
        return ClientError(f"{self._url()!r} is not the URL of an API: {error}")

    def _url(self) -> str:
        return self.api_url or os.environ.get("NIGHTJAR_API") or DEFAULT_API


@contextmanager
def opened(source: Source, options: SubmitOptions) -> Iterator[Upload]:
    """Give a source as an upload; raises RequestError where it cannot become one."""
    check_options(options)
    if isinstance(source, str | os.PathLike):
        _check_file_options(options)
        with file_upload(Path(source)) as upload:
            yield upload
        return
    with Spool() as spool:
        lines = Lines(options)
        if isinstance(source, Frame):
            frame = FrameReader(source)
            lines.check_columns(frame.columns)
            spool.write(lines.of(frame.rows()))
        else:
            spool.write(lines.of(one_or_many(source)))
        yield spool.upload()


def _check_file_options(options: Mapping[str, object]) -> None:
    """Raise RequestError for options that a file cannot have."""
    given = [name for name in ("template", "id_column", "fields") if options.get(name) is not None]
    if given:
        raise RequestError(f"{given[0]}: a file of batch lines is sent as it is; leave it out")


def _authorization(api_key: str | None) -> dict[str, str]:
    key = (api_key or "").strip()
    if not key:
        return {}
    if not key.isascii() or not key.isprintable() or " " in key:
        # Not the key itself: messages end in logs.
        raise ClientError(
            "NIGHTJAR_API_KEY is no key: it holds spaces or characters that a header cannot carry"
        )
    return {"Authorization": f"Bearer {key}"}
