"""Steps recorded as CUDA graphs, by a stand-in for torch.cuda that has only what is used."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from nightjar.gpu_worker.models import graphs
from nightjar.gpu_worker.models.graphs import WARM_UPS, CudaGraphs


class Stream:
    def wait_stream(self, other):
        assert other is not self


class Cuda:
    """A recording ends as in torch: where that raises, its stream stays the current one."""

    Stream = Stream

    def __init__(self, ends):
        self.main = self.now = Stream()
        self.recording = False
        self.ends = ends

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
    with pytest.raises(RuntimeError, match="during capture"):
        CudaGraphs()(lambda: None)
    assert cuda.now is cuda.main
