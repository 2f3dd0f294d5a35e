"""A planner and a worker in one thread pool, for single calls without a model or a broker."""

import threading
from concurrent.futures import ThreadPoolExecutor

from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.worker.answers import Computed, make_result
from nightjar.jobs.records import (
    ClaimedRequest,
    EncodedRequest,
    JsonObject,
    MicroBatchRef,
    NewMicroBatch,
    NewResult,
    PlannedCall,
    RequestError,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store

MODEL = "f" * 64


def result_of(request: ClaimedRequest) -> NewResult:
    """What a worker makes of an engine's answer that is made up."""
    by = Computed("tiny", "fp32")
    if request.kind is RequestKind.RANK:
        nll: list[float | None] = [3.0, 1.0, 2.0][: len(request.segments) - 1]
        return make_result(request, messages.Ranked(1, nll, [4] * len(nll)), by)
    report = messages.TokenReport(b"hi", 0, -0.5, [(b"hi", -0.5)])
    reports = None if request.body["logprobs"] is None else [report]
    outputs = [
        messages.Output(f"hi {sample}".encode(), 2, "stop", reports)
        for sample in range(request.body["n"])
    ]
    return make_result(request, messages.Generated(1, outputs), by)


class Worker:
    """Stands at the end of the quick path: plans without a tokenizer, computes in a thread."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.threads = ThreadPoolExecutor(2)
        self.answers = threading.Event()  # cleared: it holds what it was sent
        self.answers.set()
        self.make = result_of
        self.refusal: RequestError | None = None
        self.broken = False
        self.sent: list[MicroBatchRef] = []

    def plan(
        self, job_id: str, model: str, kind: RequestKind, body: JsonObject
    ) -> PlannedCall | RequestError | None:
        segments = [[1]] * (1 + len(body.get("documents", ())))
        batch = NewMicroBatch(kind, 32, [0], 9)
        return self.refusal or PlannedCall(EncodedRequest(0, segments), batch, MODEL)

    def send(self, ref: MicroBatchRef) -> None:
        if self.broken:
            raise OSError("no broker")
        self.sent.append(ref)
        self.threads.submit(self._compute, ref)

    def _compute(self, ref: MicroBatchRef) -> None:
        self.answers.wait(30)
        claimed = self.store.leases.claim(ref.id, ref.epoch, "worker", ref.fingerprint)
        if claimed is not None:
            results = [self.make(request) for request in claimed.requests]
            self.store.leases.finish(ref.id, ref.epoch, "worker", results)
