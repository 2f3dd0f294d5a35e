"""A small client of the HTTP API."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

_UPLOAD_TIMEOUT_S = 600.0
_PAGE = 1000
_LONGEST_WAIT_S = 60.0


class ClientError(Exception):
    """The API refused a call (the message is its answer) or cannot be reached."""


class Client:
    """Submits jobs and follows them.

    Args:
        api_url: Where `nightjar api` listens, for example `http://127.0.0.1:8000`.
        transport: Sends the requests, for example through a proxy; httpx's own by default.
        api_key: The key that is sent; that of NIGHTJAR_API_KEY by default.
    """

    def __init__(
        self,
        api_url: str,
        transport: httpx.BaseTransport | None = None,
        api_key: str | None = None,
    ) -> None:
        headers = _authorization(api_key or os.environ.get("NIGHTJAR_API_KEY"))
        try:
            self._http = httpx.Client(
                base_url=api_url, timeout=30.0, transport=transport, headers=headers
            )
        except httpx.InvalidURL as error:
            raise ClientError(f"{api_url!r} is not the URL of an API: {error}") from error

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def submit(
        self,
        source: Path,
        idempotency_key: str | None = None,
        completion_window: str | None = None,
        priority: int = 0,
        *,
        model: str | None = None,
        wait_for_model: bool = False,
        keep_results: str | None = None,
    ) -> dict[str, Any]:
        """Send a file of OpenAI batch lines; return the job.

        Args:
            source: The file; it is streamed.
            idempotency_key: Sending the same key again returns the same job.
            completion_window: Such as "24h"; requests not computed by then expire.
            priority: 0 to 9; each step is worth an hour of waiting.
            model: The job's model; by default the one that its lines name, or the only one.
            wait_for_model: An unknown model is no error: the job waits until it is served.
            keep_results: Such as "7d"; its requests and results are purged so long after its end.
        """
        query: dict[str, str | int] = {} if priority == 0 else {"priority": priority}
        if completion_window is not None:
            query["completion_window"] = completion_window
        if model is not None:
            query["model"] = model
        if wait_for_model:
            query["wait_for_model"] = "true"
        if keep_results is not None:
            query["keep_results"] = keep_results
        headers = {"Content-Type": "application/jsonl"}
        if idempotency_key is not None:
            headers["Idempotency-Key"] = idempotency_key
        with source.open("rb") as stream:
            return self._call(
                "POST",
                "/v1/jobs",
                params=query,
                content=stream,
                headers=headers,
                timeout=_UPLOAD_TIMEOUT_S,
            )

    def job(self, job_id: str) -> dict[str, Any]:
        """Return a job's state and counts."""
        return self._call("GET", _path(job_id))

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Ask for a job to be cancelled; landed results stay."""
        return self._call("POST", f"{_path(job_id)}/cancel")

    def pause(self, job_id: str) -> dict[str, Any]:
        """Pause a job: no more of it starts until it is resumed."""
        return self._call("POST", f"{_path(job_id)}/pause")

    def resume(self, job_id: str) -> dict[str, Any]:
        """Continue a paused job."""
        return self._call("POST", f"{_path(job_id)}/resume")

    def retry(self, job_id: str) -> dict[str, Any]:
        """Compute requests again whose failure they did not cause; `retried` counts them."""
        return self._call("POST", f"{_path(job_id)}/retry")

    def models(self) -> list[dict[str, Any]]:
        """Return the models that jobs may name; `served` says whether a GPU worker has them."""
        found: list[dict[str, Any]] = self._call("GET", "/v1/models")["data"]
        return found

    def results(self, job_id: str, outcome: str = "all") -> Iterator[dict[str, Any]]:
        """Yield OpenAI batch output lines of the landed results.

        The lines are in row order if the job is over, else in the order of landing.
        """
        order = "landed" if self.job(job_id)["finished_at"] is None else "row"
        for page in self._pages(job_id, order, outcome):
            yield from page["data"]
            if not page["has_more"]:
                return

    def follow(
        self, job_id: str, outcome: str = "all", every_s: float = 1.0
    ) -> Iterator[dict[str, Any]]:
        """Yield each output line once, as it lands, until the job is over.

        Args:
            job_id: A job that may still run.
            outcome: "all", "succeeded" or "failed".
            every_s: Seconds between two polls while nothing lands.
        """
        for page in self._pages(job_id, "landed", outcome):
            yield from page["data"]
            if page["complete"]:
                return
            if not page["has_more"]:
                time.sleep(every_s)

    def _pages(self, job_id: str, order: str, outcome: str) -> Iterator[dict[str, Any]]:
        """Yield page after page, without end."""
        query: dict[str, Any] = {"order": order, "limit": _PAGE, "outcome": outcome, "after": -1}
        while True:
            page = self._call("GET", f"{_path(job_id)}/results", params=query)
            yield page
            query["after"] = page["next_after"]

    def first_failure(self, job_id: str) -> dict[str, Any] | None:
        """Return the output line of the failure that landed first, if there is one."""
        query = {"limit": 1, "outcome": "failed", "order": "landed"}
        lines = self._call("GET", f"{_path(job_id)}/results", params=query)["data"]
        return lines[0] if lines else None

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        url = f"{str(self._http.base_url).rstrip('/')}{path}"
        try:
            response = self._send(method, path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ClientError(f"{method} {url}: {error}; is `nightjar api` there?") from error
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            status = f"{response.status_code} {response.reason_phrase}"
            raise ClientError(f"{method} {url}: {status}, which is no answer of Nightjar's API")
        if response.is_error:
            said = answer.get("error") or answer.get("detail") or answer
            message = said.get("message", said) if isinstance(said, dict) else said
            if response.status_code == httpx.codes.UNAUTHORIZED:
                message = f"{message}; commands send the key of NIGHTJAR_API_KEY"
            raise ClientError(f"{method} {path}: {response.status_code}: {message}")
        return answer

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a call; where the tenant has sent too many, wait as told, and send it again."""
        while True:
            response = self._http.request(method, path, **options)
            wait_s = _wait_s(response)
            if wait_s is None or "content" in options:  # a file that was read is not sent again
                return response
            time.sleep(wait_s)


def _wait_s(response: httpx.Response) -> float | None:
    """How long the API asks to wait; None if it does not, or for long."""
    is_limited = response.status_code == httpx.codes.TOO_MANY_REQUESTS
    if not is_limited or response.headers.get("x-should-retry") == "false":
        return None
    told_ms = response.headers.get("retry-after-ms", "")
    if not (told_ms.isascii() and told_ms.isdecimal()) or int(told_ms) > _LONGEST_WAIT_S * 1_000:
        return None
    return int(told_ms) / 1_000


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


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"
