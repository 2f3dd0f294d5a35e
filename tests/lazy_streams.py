"""CUDA streams and events without a GPU: work on a stream is done as late as it may be.

What the host does itself stands for the current stream: it happens at once.  Work that was queued
on another stream happens when the current stream waits for it, or where `whim` is true; then all
that it waits for happens before it.  So a wait that is missing shows: what should be there is not,
or what should have been copied is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random


class Work:
    """Something queued, and what must happen before it."""

    def __init__(self, run: Callable[[], None], after: list[Work]) -> None:
        self.run = run
        self.after = after
        self.done = False

    def do(self) -> None:
        if self.done:
            return
        for other in self.after:
            other.do()
        self.done = True
        self.run()


class Event:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.last: Work | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.last = (stream or self._streams.now).last

    def query(self) -> bool:
        if self.last is not None and self._streams.whim.random() < 0.3:
            self.last.do()
        return self.last is None or self.last.done

    def elapsed_time(self, end: Event) -> float:
        assert end.last is None or end.last.done
        return 1.0


class Stream:
    """The current stream has no queue: `immediate`."""

    def __init__(self, streams: Streams, *, immediate: bool = False) -> None:
        self._streams = streams
        self._immediate = immediate
        self.last: Work | None = None

    def put(self, run: Callable[[], None], after: list[Work] | None = None) -> None:
        before = [] if self.last is None else [self.last]
        work = Work(run, before + (after or []))
        if self._immediate:
            work.do()
        else:
            self.last = work

    def wait_event(self, event: Event) -> None:
        if event.last is not None:
            self.put(lambda: None, [event.last])

    def wait_stream(self, stream: Stream) -> None:
        if stream.last is not None:
            self.put(lambda: None, [stream.last])


class Streams:
    """In the place of torch.cuda, as far as transfers need it."""

    def __init__(self, seed: int) -> None:
        self.whim = Random(seed)
        self.main = Stream(self, immediate=True)
        self.now = self.main

    def Stream(self, device: object = None) -> Stream:  # noqa: N802 (torch's names)
        return Stream(self)

    def Event(self, *, enable_timing: bool = False) -> Event:  # noqa: N802
        return Event(self)

    def current_stream(self) -> Stream:
        return self.now

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before
