"""Computes requests again, in a higher precision, whose scores were not finite."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from nightjar.gpu_worker.engine.requests import RequestFailed, Result
from nightjar.requests import Request

logger = logging.getLogger(__name__)

NOT_FINITE = "the model's scores are NaN or infinite"


class PreciseEngine(Protocol):
    """The methods that a rescue calls on its engine; `loop.Engine` has them."""

    precision: str

    def submit(self, request: Request) -> None:
        """Hand in a request."""

    def cancel(self, request_id: int) -> None:
        """Drop a request at the next step."""

    def step(self) -> list[Result]:
        """Run one step and return the requests that ended in it."""


class Rescue:
    """A second engine over the same model in a higher precision, made when it is first needed.

    Its answers name their precision. A request that fails there is not computed again.
    """

    def __init__(self, make_engine: Callable[[], PreciseEngine]) -> None:
        self._make_engine = make_engine
        self._engine: PreciseEngine | None = None
        self._refusal: str | None = None
        self._requests: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._requests)

    @property
    def engine(self) -> PreciseEngine | None:
        """The second engine; None until it is needed, and where it cannot be made."""
        return self._engine

    def submit(self, request: Request) -> RequestFailed | None:
        """Take in a request; return its failure if no second engine can be made."""
        if self._engine is None and self._refusal is None:
            self._load()
        if self._engine is None:
            return RequestFailed(request.request_id, "not_finite", f"{NOT_FINITE}, {self._refusal}")
        self._engine.submit(request)
        self._requests.add(request.request_id)
        return None

    def cancel(self, request_id: int) -> None:
        """Drop a request at the next step."""
        if self._engine is not None:
            self._engine.cancel(request_id)

    def holds(self, request_id: int) -> bool:
        """Whether the request is being computed here."""
        return request_id in self._requests

    def step(self) -> list[Result]:
        """Run one step of the second engine and return the requests that ended in it."""
        if self._engine is None:
            return []
        results = [self._marked(result, self._engine) for result in self._engine.step()]
        self._requests.difference_update(result.request_id for result in results)
        return results

    def _load(self) -> None:
        """Make the second engine; a failure is remembered, so that loading is tried only once."""
        try:
            self._engine = self._make_engine()
        except Exception as error:
            logger.exception("no higher precision can be loaded")
            self._refusal = f"and no higher precision can be loaded: {error}"

    def _marked(self, result: Result, engine: PreciseEngine) -> Result:
        """Add to a result the precision that it was computed in."""
        if isinstance(result, RequestFailed):
            if result.code != "cache_exceeded":
                return result
            # The first engine had room for the request: its scores are the error.
            message = f"{NOT_FINITE}, and in {engine.precision}: {result.message}"
            return replace(result, code="not_finite", message=message)
        return replace(result, recomputed_in=engine.precision)
