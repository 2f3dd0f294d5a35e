"""Plan: turn a job's queued requests into micro-batches, a chunk and a transaction at a time."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.records import (
    EncodedRequest,
    NewResult,
    QueuedRequest,
    RequestError,
    RequestKind,
)
from nightjar.jobs.store import Store
from nightjar.pipeline.encode import Encoder
from nightjar.pipeline.pack import Packable, pack
from nightjar.pipeline.reuse import open_cache
from nightjar.pipeline.settings import Settings

logger = logging.getLogger(__name__)


class Planner:
    """Plans jobs for the model that this deployment serves.

    Planning a job twice at once is harmless (the store takes each request once) but wasteful,
    so one process does not begin a job that it is already planning.
    """

    def __init__(self, settings: Settings, store: Store, model: ModelDirectory) -> None:
        self._settings = settings
        self.fingerprint = model.fingerprint
        self._cache = open_cache(settings, store, model)
        self._store = store
        self._encoder = Encoder(
            model.config,
            model.tokenizer(),
            find_vectors=store.prompt_vector,
            served_name=None if settings.accept_any_model else settings.model_name or model.name,
            chat_template=model.chat_template(),
        )
        self._lock = threading.Lock()
        self._planning: set[str] = set()

    def plan(self, job_id: str, after_chunk: Callable[[], object]) -> int:
        """Plan everything that is queued in the job.

        Args:
            job_id: The job.
            after_chunk: Called after each committed chunk: dispatching starts at once.

        Returns:
            Number of requests planned or rejected here.
        """
        done = 0
        with self._only_here(job_id) as mine:
            while mine:
                requests = self._store.queued_requests(job_id, self._settings.plan_chunk_requests)
                if not requests:
                    break
                self._plan_chunk(job_id, requests)
                done += len(requests)
                after_chunk()
        return done

    def _plan_chunk(self, job_id: str, requests: list[QueuedRequest]) -> None:
        encoded, rejected = self._encode(requests)
        by_id = {request.id: request for request in requests}
        answered: list[NewResult] = []
        if self._cache is not None:
            answered = self._cache.find((by_id[item.id], item) for item in encoded)
            known = {item.request_id for item in answered}
            encoded = [item for item in encoded if item.id not in known]
        batches = pack(
            [_packable(by_id[item.id], item) for item in encoded],
            most_requests=self._settings.micro_batch_requests,
            most_tokens=self._settings.micro_batch_tokens,
        )
        self._store.save_plan(
            job_id, encoded, batches, rejected, answered, fingerprint=self.fingerprint
        )
        logger.info(
            "planned %d requests of %s into %d micro-batches, refused %d, had %d answers",
            len(encoded),
            job_id,
            len(batches),
            len(rejected),
            len(answered),
            extra={"action": "plan_chunk", "job_id": job_id},
        )

    def _encode(
        self, requests: list[QueuedRequest]
    ) -> tuple[list[EncodedRequest], list[tuple[int, RequestError]]]:
        """Encode together; if that raises, one by one, so that only the culprit fails."""
        try:
            return self._encoder.encode(requests)
        except Exception:
            logger.exception("a chunk cannot be encoded; encoding its requests one by one")
        encoded: list[EncodedRequest] = []
        rejected: list[tuple[int, RequestError]] = []
        for request in requests:
            try:
                done, refused = self._encoder.encode([request])
            except Exception as error:
                logger.exception("request %d cannot be encoded", request.id)
                fault = f"the planner failed: {type(error).__name__}"
                refused = [(request.id, RequestError("internal_error", fault))]
                done = []
            encoded += done
            rejected += refused
        return encoded, rejected

    @contextmanager
    def _only_here(self, job_id: str) -> Iterator[bool]:
        with self._lock:
            mine = job_id not in self._planning
            self._planning.add(job_id)
        try:
            yield mine
        finally:
            if mine:
                with self._lock:
                    self._planning.discard(job_id)


def _packable(request: QueuedRequest, encoded: EncodedRequest) -> Packable:
    generates = request.kind is RequestKind.GENERATE
    return Packable(encoded, request.kind, int(request.body["max_tokens"]) if generates else 0)
