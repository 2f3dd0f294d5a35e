"""Steps recorded as CUDA graphs, by a stand-in for torch.cuda that has only what is used."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nightjar.gpu_worker.models import graphs
from nightjar.gpu_worker.models.graphs import WARM_UPS, CudaGraphs, NotRecordedError


class Stream:
    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        assert other is not self
        self.waited_for.append(other)


class Cuda:
    """A recording ends as in torch: where that raises, its stream stays the current one."""

    Stream = Stream

    def __init__(self, ends):
        self.main = self.now = Stream()
        self.recording = False
        self.ends = ends
        self.pools = []

    def current_stream(self):
        return self.now

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def CUDAGraph(self):  # noqa: N802 (torch's name)
        return SimpleNamespace(pool=lambda: "pool", replay=lambda: None)

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"  # a rank's other threads query events
        self.pools.append(pool)
        before, self.now, self.recording = self.now, stream, True
        try:
            yield
        finally:
            self.recording = False
            self.ends()
            self.now = before


def end_badly():
    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_step_is_recorded_on_a_stream_of_its_own_after_it_was_run(monkeypatch):
    cuda = Cuda(lambda: None)
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda))
    seen = []
    CudaGraphs()(lambda: seen.append((cuda.recording, cuda.now is cuda.main)))
    assert seen == [(False, False)] * WARM_UPS + [(True, False)]
    assert cuda.now is cuda.main


def test_where_a_recording_fails_the_stream_is_what_it_was(monkeypatch):
    """The engine goes on without graphs, on the stream that its weights and its cache are on."""
    cuda = Cuda(end_badly)
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda))
    with pytest.raises(NotRecordedError, match="during capture"):
        CudaGraphs()(lambda: None)
    assert cuda.now is cuda.main
    assert len(cuda.main.waited_for) == 1  # what was run before the recording


def test_what_the_step_itself_raises_comes_as_it_is(monkeypatch):
    """It was not recorded when it failed, so nothing is known of recordings."""
    cuda = Cuda(lambda: None)
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda))

    def no_room():
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        CudaGraphs()(no_room)
    assert cuda.now is cuda.main


@pytest.mark.parametrize("free", [1001, 1000])
def test_the_memory_of_the_largest_step_is_taken_before_the_first_recording(monkeypatch, free):
    """Every recording has its part of it. Where it is not there, recordings take what they need."""
    cuda, taken = Cuda(lambda: None), []

    def empty(size, **_):
        assert cuda.recording
        taken.append(size)
        return torch.empty(size, dtype=torch.uint8)

    stand_in = SimpleNamespace(cuda=cuda, empty=empty, uint8=torch.uint8)
    monkeypatch.setattr(graphs, "torch", stand_in)
    monkeypatch.setattr(graphs, "free_bytes", lambda _: free)
    record = CudaGraphs(1000)
    for _ in range(3):
        record(lambda: None)
    assert taken == ([1000] if free > 1000 else [])
    assert cuda.pools == [None, *["pool"] * (len(cuda.pools) - 1)]
    assert len(cuda.pools) == 3 + len(taken)
