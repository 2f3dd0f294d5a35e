"""`AsyncClient` and its jobs: the same operations, with a transport of asyncio."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx

from nightjar.pipeline.client import operations
from nightjar.pipeline.client.asynchronous_schedules import AsyncSchedules
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
from nightjar.pipeline.client.sources import Lines, Row, Rows, Source, one_or_many
from nightjar.pipeline.client.steps import Call, Pause, Steps, Value
from nightjar.pipeline.client.uploads import Spool, Upload

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    from typing_extensions import Unpack

_ROWS_AT_ONCE = 1_000


class AsyncClient:
    """Submits jobs to a deployment and follows them, in asyncio; `Client` has the arguments."""

    def __init__(
        self,
        api_url: str | None = None,
        *,
        api_key: str | None = None,
        retries: int = DEFAULT_RETRIES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._connecting = Connecting(api_url, api_key, retries, timeout_s)
        self.asking = self._connecting.asking()
        try:
            self._http = httpx.AsyncClient(transport=transport, **self._connecting.http_options())
        except httpx.InvalidURL as error:
            raise self._connecting.unusable(error) from error

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; jobs go on."""
        await self._http.aclose()

    async def submit(
        self, source: Source | AsyncIterable[Row], **options: "Unpack[SubmitOptions]"
    ) -> "AsyncJob":
        """Submit a job as `Client.submit` does; the source may be an asynchronous iterable, too.

        An iterable that is not asynchronous is read in a thread.
        """
        with ExitStack() as stack:
            if isinstance(source, AsyncIterable):
                upload = await _spooled(stack.enter_context(Spool()), source, options)
            else:
                held = opened(source, options)
                upload = await asyncio.to_thread(stack.enter_context, held)
            status = await self.take(operations.submit(self.asking, upload, options))
        return AsyncJob(self, status.id, status)

    async def open(self, **options: "Unpack[SubmitOptions]") -> "AsyncOpenJob":
        """Open a job without rows, as `Client.open` does."""
        check_options(options)
        status = await self.take(operations.open_job(self.asking, options))
        return AsyncOpenJob(self, status, options)

    def job(self, job_id: str) -> "AsyncJob":
        """Return a job by its id; the API is asked when the job is used."""
        return AsyncJob(self, job_id)

    async def jobs(self) -> AsyncIterator[JobStatus]:
        """Yield the tenant's jobs, newest first."""
        pages = operations.jobs(self.asking)
        while (found := await self.take(pages.following())) is not None:
            for one in found:
                yield one

    @property
    def schedules(self) -> AsyncSchedules:
        """What runs at planned times."""
        return AsyncSchedules(self)

    async def models(self) -> list[Model]:
        """Return the models that jobs may name."""
        return await self.take(operations.models(self.asking))

    async def take(self, steps: Steps[Value]) -> Value:
        """Take the steps of an operation, and return what it returns."""
        try:
            step = next(steps)
            while True:
                try:
                    answer = await self._perform(step)
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            found: Value = end.value
            return found

    async def _perform(self, step: Call | Pause) -> httpx.Response | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        content = None if step.upload is None else _pieces(step.upload)
        options = self._connecting.call_options(step)
        return await self._http.request(step.method, step.path, content=content, **options)


class AsyncJob:
    """A job of a deployment, in asyncio; `Job` says what each method does."""

    def __init__(
        self, client: AsyncClient, job_id: str, submitted: JobStatus | None = None
    ) -> None:
        self.id = job_id
        self.submitted = submitted
        self._client = client

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    async def status(self) -> JobStatus:
        """Return how the job stands now."""
        return await self._client.take(operations.status(self._client.asking, self.id))

    async def wait(
        self,
        timeout: float | None = None,
        progress: bool | Callable[[JobStatus], object] = False,
    ) -> JobStatus:
        """Wait until the job is over; raises WaitTimeoutError."""
        with shown(progress) as told:
            steps = operations.wait(self._client.asking, self.id, timeout, told)
            return await self._client.take(steps)

    async def results(self, outcome: Outcome = "all") -> AsyncIterator[Result]:
        """Yield the results so far: in row order if the job is over, else in order of landing."""
        async for one in self._each(ResultPages(self._client.asking, self.id, outcome)):
            yield one

    async def follow(self, outcome: Outcome = "all", every_s: float = 1.0) -> AsyncIterator[Result]:
        """Yield each result once, as it lands, until the job is over."""
        pages = ResultPages(self._client.asking, self.id, outcome, follow_every_s=every_s)
        async for one in self._each(pages):
            yield one

    async def first_failure(self) -> Result | None:
        """Return the failure that landed first, if there is one."""
        return await self._client.take(operations.first_failure(self._client.asking, self.id))

    async def cancel(self) -> JobStatus:
        """Ask for the job's end; results that have landed stay."""
        return await self._steer("cancel")

    async def pause(self) -> JobStatus:
        """Pause the job: no more of it starts until it is resumed."""
        return await self._steer("pause")

    async def resume(self) -> JobStatus:
        """Continue the paused job."""
        return await self._steer("resume")

    async def retry(self) -> JobStatus:
        """Compute requests again whose failure they did not cause; `retried` counts them."""
        return await self._steer("retry")

    async def to_arrow(self) -> "pa.Table":
        """Return all results in row order; raises UnfinishedError before the job is over."""
        return (await self._table()).arrow()

    async def to_pandas(self) -> "pd.DataFrame":
        """Return all results in row order; raises UnfinishedError before the job is over."""
        return (await self._table()).pandas()

    async def to_polars(self) -> "pl.DataFrame":
        """Return all results in row order; raises UnfinishedError before the job is over."""
        return (await self._table()).polars()

    async def _steer(self, action: Action) -> JobStatus:
        return await self._client.take(operations.steer(self._client.asking, self.id, action))

    async def _each(self, pages: ResultPages) -> AsyncIterator[Result]:
        while (found := await self._client.take(pages.following())) is not None:
            for one in found:
                yield one

    async def _table(self) -> ResultTable:
        table = ResultTable()
        pages = ResultPages(self._client.asking, self.id, "all", only_whole=True)
        while (found := await self._client.take(pages.following())) is not None:
            table.add(found)
        return table


class AsyncOpenJob(AsyncJob):
    """A job that takes rows, in asyncio; `OpenJob` says what each method does."""

    def __init__(self, client: AsyncClient, status: JobStatus, options: SubmitOptions) -> None:
        super().__init__(client, status.id, status)
        self._parts = Parts(options, status.counts.total)

    async def __aenter__(self) -> "AsyncOpenJob":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            await self.seal()

    @property
    def rows(self) -> int:
        """Rows of the job so far, those included that are not sent yet."""
        return self._parts.added

    async def append(self, rows: Row | Rows | AsyncIterable[Row]) -> None:
        """Append one row or several; an asynchronous iterable is read as its rows come."""
        if isinstance(rows, AsyncIterable):
            async for row in rows:
                await self.append(row)
            return
        for part in self._parts.full(one_or_many(rows)):
            await self._client.take(operations.append(self._client.asking, self.id, part))

    async def flush(self) -> None:
        """Send the rows that are gathered."""
        for part in self._parts.rest():
            await self._client.take(operations.append(self._client.asking, self.id, part))

    async def seal(self) -> JobStatus:
        """Send what is gathered, and end the appending."""
        await self.flush()
        sealing = operations.seal(self._client.asking, self.id, self._parts.sent)
        return await self._client.take(sealing)


async def _spooled(spool: Spool, rows: AsyncIterable[Row], options: SubmitOptions) -> Upload:
    """Write rows to a spool as they come."""
    check_options(options)
    lines, some = Lines(options), list[Row]()
    async for row in rows:
        some.append(row)
        if len(some) == _ROWS_AT_ONCE:
            await asyncio.to_thread(spool.write, lines.of(some))
            some.clear()
    spool.write(lines.of(some))
    return spool.upload()


async def _pieces(upload: Upload) -> AsyncIterator[bytes]:
    pieces = upload.pieces()
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
