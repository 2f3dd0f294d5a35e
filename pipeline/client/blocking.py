"""`Client` and its jobs: every operation, with a transport that blocks."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx

from nightjar.pipeline.client import operations
from nightjar.pipeline.client.connecting import (
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT_S,
    Connecting,
    opened,
)
from nightjar.pipeline.client.frames import ResultTable
from nightjar.pipeline.client.operations import Action, Outcome, ResultPages
from nightjar.pipeline.client.options import SubmitOptions, check_options
from nightjar.pipeline.client.parts import Parts
from nightjar.pipeline.client.progress import shown
from nightjar.pipeline.client.records import JobStatus, Model, Result
from nightjar.pipeline.client.schedules import Schedules
from nightjar.pipeline.client.sources import Row, Rows, Source, one_or_many
from nightjar.pipeline.client.steps import Call, Pause, Steps, Value

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    from typing_extensions import Unpack


class Client:
    """Submits jobs to a deployment and follows them; may be used from several threads.

    Args:
        api_url: Where `nightjar api` listens; by default NIGHTJAR_API, or port 8000 of this host.
        api_key: The key that is sent; that of NIGHTJAR_API_KEY by default.
        retries: How often a call is tried again where the connection broke or the API is away.
        timeout_s: How long the API may be silent.
        transport: Sends the requests, for example through a proxy; httpx's own by default.
    """

    def __init__(
        self,
        api_url: str | None = None,
        *,
        api_key: str | None = None,
        retries: int = DEFAULT_RETRIES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._connecting = Connecting(api_url, api_key, retries, timeout_s)
        self.asking = self._connecting.asking()
        try:
            self._http = httpx.Client(transport=transport, **self._connecting.http_options())
        except httpx.InvalidURL as error:
            raise self._connecting.unusable(error) from error

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; jobs go on."""
        self._http.close()

    def submit(self, source: Source, **options: "Unpack[SubmitOptions]") -> "Job":
        """Submit a job, and return it; it is submitted once, however often the connection breaks.

        Args:
            source: The path of a file of batch lines, a frame (pandas, polars, pyarrow), or any
                iterable of `Generate`, `Chat`, `Rank` and dictionaries. A dictionary is a batch
                line, or a body with an optional custom_id.
            options: See `SubmitOptions`.

        Raises:
            RequestError: The source cannot become requests; nothing was sent.
            RefusedError: The API refuses the job.
        """
        with opened(source, options) as upload:
            status = self.take(operations.submit(self.asking, upload, options))
        return Job(self, status.id, status)

    def open(self, **options: "Unpack[SubmitOptions]") -> "OpenJob":
        """Open a job without rows, for rows that come one after another; `SubmitOptions` are its.

        With the `idempotency_key` of an open job, that job goes on.

        Raises:
            RefusedError: The API refuses the job.
        """
        check_options(options)
        status = self.take(operations.open_job(self.asking, options))
        return OpenJob(self, status, options)

    def job(self, job_id: str) -> "Job":
        """Return a job by its id; the API is asked when the job is used."""
        return Job(self, job_id)

    def jobs(self) -> Iterator[JobStatus]:
        """Yield the tenant's jobs, newest first."""
        pages = operations.jobs(self.asking)
        while (found := self.take(pages.following())) is not None:
            yield from found

    @property
    def schedules(self) -> Schedules:
        """What runs at planned times."""
        return Schedules(self)

    def models(self) -> list[Model]:
        """Return the models that jobs may name."""
        return self.take(operations.models(self.asking))

    def take(self, steps: Steps[Value]) -> Value:
        """Take the steps of an operation, and return what it returns."""
        try:
            step = next(steps)
            while True:
                try:
                    answer = self._perform(step)
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            found: Value = end.value
            return found

    def _perform(self, step: Call | Pause) -> httpx.Response | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        content = None if step.upload is None else step.upload.pieces()
        options = self._connecting.call_options(step)
        return self._http.request(step.method, step.path, content=content, **options)


class Job:
    """A job of a deployment.

    Attributes:
        id: Its id.
        submitted: What the API said when it was submitted here; None for a job named by its id.
    """

    def __init__(self, client: Client, job_id: str, submitted: JobStatus | None = None) -> None:
        self.id = job_id
        self.submitted = submitted
        self._client = client

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    def status(self) -> JobStatus:
        """Return how the job stands now."""
        return self._client.take(operations.status(self._client.asking, self.id))

    def wait(
        self,
        timeout: float | None = None,
        progress: bool | Callable[[JobStatus], object] = False,
    ) -> JobStatus:
        """Wait until the job is over, however it ends, and return how it ended.

        Args:
            timeout: Seconds; None means for ever.
            progress: True shows a bar on standard error. A function is called with each status.

        Raises:
            WaitTimeoutError: The job is not over in time; it goes on.
        """
        with shown(progress) as told:
            return self._client.take(operations.wait(self._client.asking, self.id, timeout, told))

    def results(self, outcome: Outcome = "all") -> Iterator[Result]:
        """Yield the results so far: in row order if the job is over, else in order of landing."""
        yield from self._each(self._pages(outcome))

    def follow(self, outcome: Outcome = "all", every_s: float = 1.0) -> Iterator[Result]:
        """Yield each result once, as it lands, until the job is over.

        Args:
            outcome: "all", "succeeded" or "failed".
            every_s: Seconds between two calls while nothing lands.
        """
        yield from self._each(self._pages(outcome, follow_every_s=every_s))

    def first_failure(self) -> Result | None:
        """Return the failure that landed first, if there is one."""
        return self._client.take(operations.first_failure(self._client.asking, self.id))

    def cancel(self) -> JobStatus:
        """Ask for the job's end; results that have landed stay."""
        return self._steer("cancel")

    def pause(self) -> JobStatus:
        """Pause the job: no more of it starts until it is resumed."""
        return self._steer("pause")

    def resume(self) -> JobStatus:
        """Continue the paused job."""
        return self._steer("resume")

    def retry(self) -> JobStatus:
        """Compute requests again whose failure they did not cause; `retried` counts them."""
        return self._steer("retry")

    def to_arrow(self) -> "pa.Table":
        """Return all results in row order; raises UnfinishedError before the job is over."""
        return self._table().arrow()

    def to_pandas(self) -> "pd.DataFrame":
        """Return all results in row order; raises UnfinishedError before the job is over."""
        return self._table().pandas()

    def to_polars(self) -> "pl.DataFrame":
        """Return all results in row order; raises UnfinishedError before the job is over."""
        return self._table().polars()

    def _steer(self, action: Action) -> JobStatus:
        return self._client.take(operations.steer(self._client.asking, self.id, action))

    def _pages(self, outcome: Outcome, follow_every_s: float | None = None) -> ResultPages:
        return ResultPages(self._client.asking, self.id, outcome, follow_every_s=follow_every_s)

    def _each(self, pages: ResultPages) -> Iterator[Result]:
        while (found := self._client.take(pages.following())) is not None:
            yield from found

    def _table(self) -> ResultTable:
        table = ResultTable()
        pages = ResultPages(self._client.asking, self.id, "all", only_whole=True)
        while (found := self._client.take(pages.following())) is not None:
            table.add(found)
        return table


class OpenJob(Job):
    """A job that takes rows: append them, then seal it; for one producer, in one thread.

    Rows are gathered into parts of up to 1,000, and sent. `append` waits while too many rows of the
    job, or of the tenant, have no outcome. In a `with` block the job is sealed at its end. After an
    exception it stays open: open it again with its `idempotency_key`, or cancel it.
    """

    def __init__(self, client: Client, status: JobStatus, options: SubmitOptions) -> None:
        super().__init__(client, status.id, status)
        self._parts = Parts(options, status.counts.total)

    def __enter__(self) -> "OpenJob":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.seal()

    @property
    def rows(self) -> int:
        """Rows of the job so far, those included that are not sent yet."""
        return self._parts.added

    def append(self, rows: Row | Rows) -> None:
        """Append one row or several: `Generate`, `Chat`, `Rank` or dictionaries.

        Raises:
            RequestError: A row cannot become a request. The rows before it were taken.
            RefusedError: The job is sealed or stopped, or somebody else appends to it.
        """
        for part in self._parts.full(one_or_many(rows)):
            self._client.take(operations.append(self._client.asking, self.id, part))

    def flush(self) -> None:
        """Send the rows that are gathered."""
        for part in self._parts.rest():
            self._client.take(operations.append(self._client.asking, self.id, part))

    def seal(self) -> JobStatus:
        """Send what is gathered, and end the appending: the job is over with its last outcome."""
        self.flush()
        sealing = operations.seal(self._client.asking, self.id, self._parts.sent)
        return self._client.take(sealing)
