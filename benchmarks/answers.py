"""What an engine of this process answers."""

from collections.abc import Sequence

from nightjar.gpu_worker.engine import Engine, RankResult, RequestFailed, Result
from nightjar.requests import Request


def run_all(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """Submit all and step until nothing is left; results in the order of the requests."""
    for request in requests:
        engine.submit(request)
    found: dict[int, Result] = {}
    while engine.has_work:
        found.update((result.request_id, result) for result in engine.step())
    return [found[request.request_id] for request in requests]


def answers(engine: Engine, requests: Sequence[Request]) -> list[Result]:
    """The same; raises RuntimeError where a request failed."""
    results = run_all(engine, requests)
    for result in results:
        if isinstance(result, RequestFailed):
            # No wrong type: the engine has refused it.
            raise RuntimeError(f"a request failed: {result.code}: {result.message}")  # noqa: TRY004
    return results


def scores_of(result: Result) -> list[float]:
    """Of every document of a ranking."""
    assert isinstance(result, RankResult)
    # None stands for documents that a top_n left out, and nobody asked for one.
    return [score for score in result.mean_nll if score is not None]
