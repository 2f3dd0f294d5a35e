"""The cache of results as planner and workers use it: who finds what was kept, and for how long."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import ClaimedRequest, EncodedRequest, NewResult, QueuedRequest
from nightjar.jobs.states import RequestKind, Reuse
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.reuse import _KEPT_BETWEEN_TRIMS, ResultCache
from nightjar.pipeline.settings import Settings

GENERATE = RequestKind.GENERATE
BODY = validate_body(GENERATE, {"prompt": "a", "max_tokens": 4, "temperature": 0})


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """SQLite alone: tests/integration/test_store_result_cache.py has both."""
    return sqlite_url


@pytest.fixture
def model(tiny_model: Path) -> ModelDirectory:
    return ModelDirectory.open(tiny_model)


def cache(store: Store, model: ModelDirectory, name: str = "tiny", **given: object) -> ResultCache:
    settings = Settings.read(**({"reuse_results": True, "dtype": "fp32"} | given))
    return ResultCache(settings, store, model, name)


def keep(into: ResultCache, ids: Iterable[int], precision: str = "fp32") -> None:
    """Keep an answer to each prompt of one token id."""
    claimed = [ClaimedRequest(n, n, f"row-{n}", GENERATE, BODY, [[n]]) for n in ids]
    into.keep(claimed, [NewResult(item.id, 200, {"n": item.id}) for item in claimed], precision)


def found(by: ResultCache, ids: Iterable[int]) -> list[int]:
    """Of which of them the answer is known."""
    asked = [
        (QueuedRequest(n, "job", n, f"other-{n}", GENERATE, BODY), EncodedRequest(n, [[n]]))
        for n in ids
    ]
    results = by.find(asked)
    assert all(item.body == {"n": item.request_id} for item in results)
    assert all(item.reused is Reuse.CACHE for item in results)
    return sorted(item.request_id for item in results)


def test_an_answer_from_keys_and_values_in_fp8_is_not_one_of_a_whole_cache(
    store: Store, model: ModelDirectory
) -> None:
    keep(cache(store, model, kv_cache_dtype="fp8"), [1], "fp32+fp8-kv")
    assert found(cache(store, model, kv_cache_dtype="fp8"), [1]) == [1]
    assert found(cache(store, model, kv_cache_dtype="fp8", dtype="auto"), [1]) == [1]
    assert found(cache(store, model), [1]) == []


def test_an_answer_is_found_by_who_serves_the_same(store: Store, model: ModelDirectory) -> None:
    keep(cache(store, model), [1])
    assert found(cache(store, model), [1, 2]) == [1]
    assert found(cache(store, model, dtype="auto"), [1]) == [1]
    assert found(cache(store, model, dtype="bf16"), [1]) == []
    assert found(cache(store, model, kv_cache_dtype="fp8"), [1]) == []
    assert found(cache(store, model, "another"), [1]) == []
    assert found(cache(store, model, engine="fake"), [1]) == []


def test_an_answer_is_found_for_so_many_days(store: Store, model: ModelDirectory) -> None:
    keep(cache(store, model), [1])
    assert found(cache(store, model, result_cache_days=1), [1]) == [1]
    assert found(cache(store, model, result_cache_days=1e-12), [1]) == []


def test_the_bounds_are_looked_after_now_and_then(store: Store, model: ModelDirectory) -> None:
    small = cache(store, model, result_cache_rows=1)
    keep(small, [1, 2])
    assert len(found(small, [1, 2])) == 1  # the first time, as a worker may not live for long
    for n in range(3, 3 + _KEPT_BETWEEN_TRIMS - 1):
        keep(small, [n])
    assert len(found(small, range(1_000))) == _KEPT_BETWEEN_TRIMS
    keep(small, [999])
    assert found(small, range(1_000)) == [999]


def test_a_cache_that_is_away_is_no_cache(
    store: Store, model: ModelDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise StoreUnavailableError("away")

    reused = cache(store, model)
    for name in ("find_answers", "keep_answers", "find_scores", "keep_scores"):
        monkeypatch.setattr(store.cache, name, away)
    keep(reused, [1])
    assert found(reused, [1]) == []
    assert reused.find_scores(["key"]) == {}
    reused.keep_scores([])
