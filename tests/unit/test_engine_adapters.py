"""LoRA adapters in the engine: shared prefixes, coming and going, refusals."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from nightjar.checkpoints.adapters import read_adapter
from nightjar.gpu_worker.engine import Engine, EngineConfig, RankRequest, RequestFailed
from nightjar.gpu_worker.engine.adapters import Tuning, Tunings
from nightjar.gpu_worker.engine.executor import Executor
from nightjar.gpu_worker.engine.prompt_vectors import PromptVectors
from nightjar.gpu_worker.models import LoraAdapter
from nightjar.kernels import AdaptedRows, Place
from tests.adapters import gpt2_sizes, save_adapter
from tests.engines import assert_nothing_held, drain, generate, ids

SIZES = gpt2_sizes(2, 32, 128)


@pytest.fixture(autouse=True)
def no_step_fails(monkeypatch):
    """A step that raises would be computed again request by request: the answers would be right."""

    def raised(self, plan, check_device):
        raise AssertionError("a step has failed")

    monkeypatch.setattr(Executor, "run_one_by_one", raised)


@pytest.fixture(scope="module")
def factors(tmp_path_factory, model):
    """Of two adapters, by seed."""
    folder = tmp_path_factory.mktemp("adapters")
    found = {}
    for seed in (1, 2):
        path = save_adapter(folder / str(seed), SIZES, seed=seed)
        read = read_adapter(path, model.config)
        found[seed] = {name: torch.from_numpy(one) for name, one in read.items()}
    return found


@pytest.fixture
def engine(model, token_bytes, factors):
    made = Engine(model, token_bytes, EngineConfig())
    made.register_adapter("a@1", factors[1])
    made.register_adapter("b@1", factors[2])
    return made


def adapted(number, adapter):
    """The same prompt with an adapter, or with none."""
    return replace(generate(number, ids(40, 3), 6), adapter=adapter)


def test_a_prefix_is_shared_within_an_adapter_only(engine):
    """The same prompt three times in turn: whatever is reused, the answers stay those of each."""
    names = [None, "a@1", "b@1", "a@1", None, "b@1"]
    found = [drain(engine, adapted(i, name))[i] for i, name in enumerate(names)]
    assert found[0].token_ids == found[4].token_ids
    assert found[1].token_ids == found[3].token_ids
    assert found[2].token_ids == found[5].token_ids
    assert len({tuple(one.token_ids) for one in found}) == 3
    assert [one.cached_tokens > 0 for one in found] == [False, False, False, True, True, True]
    assert_nothing_held(engine)


def test_the_same_adapter_under_another_name_shares_prefixes(engine, factors):
    engine.register_adapter("c@7", factors[1])
    first = drain(engine, adapted(0, "a@1"))[0]
    again = drain(engine, adapted(1, "c@7"))[1]
    assert again.token_ids == first.token_ids
    assert again.cached_tokens > 0


def test_a_forgotten_adapter_stays_with_those_that_run(engine):
    engine.submit(adapted(0, "a@1"))
    engine.step()
    engine.forget("a@1")
    engine.submit(adapted(1, "a@1"))
    results = drain(engine)
    assert isinstance(results[1], RequestFailed)
    assert (results[1].code, results[1].message) == (
        "unknown_adapter",
        "LoRA adapter 'a@1': not registered",
    )
    assert len(results[0].token_ids) == 6


def test_a_forgotten_adapter_leaves_the_memory(model, token_bytes, factors):
    tunings = Tunings(model.config)
    engine = Engine(model, token_bytes, EngineConfig(), tunings=tunings)
    engine.register_adapter("a@1", factors[1])
    drain(engine, adapted(0, "a@1"))
    held = weakref.ref(tunings.adapters.find("a@1").products.layers[0][Place.UP][0].down)
    assert held() is not None
    engine.forget("a@1")
    gc.collect()
    assert held() is None


def test_another_model_s_factors_and_nan_fail_only_who_names_them(engine, factors):
    wide = {name: torch.cat((one, one), -1) for name, one in factors[1].items()}
    engine.register_adapter("wide", wide)
    spoilt = {name: one.clone() for name, one in factors[1].items()}
    spoilt["0.up.up"][3, 1] = float("nan")
    engine.register_adapter("spoilt", spoilt)
    engine.register_adapter("none", {})
    results = drain(
        engine, *(adapted(i, n) for i, n in enumerate(("wide", "spoilt", "none", "a@1")))
    )
    assert "the model needs" in results[0].message
    assert "not all values are finite" in results[1].message
    assert "adapts nothing" in results[2].message
    assert len(results[3].token_ids) == 6


def test_a_model_in_shards_refuses_adapters_and_says_why(model, token_bytes, factors):
    model.no_adapters = "the model is split over several processes; serve it without shards"
    try:
        engine = Engine(model, token_bytes, EngineConfig())
    finally:
        del model.no_adapters
    engine.register_adapter("a@1", factors[1])
    results = drain(engine, adapted(0, "a@1"), generate(1))
    assert "serve it without shards" in results[0].message
    assert len(results[1].token_ids) == 8


def test_a_step_without_adapters_has_none(model, token_bytes, factors, monkeypatch):
    engine = Engine(model, token_bytes, EngineConfig())
    engine.register_adapter("a@1", factors[1])
    seen = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda batch, cache: seen.append(batch) or forward(batch, cache)
    )
    drain(engine, generate(0), RankRequest(1, ids(4), [ids(3, 1)]))
    assert seen
    assert all(batch.adapted is None for batch in seen)
    seen.clear()
    drain(engine, adapted(2, "a@1"))
    assert all(batch.adapted is not None for batch in seen)


def test_the_salt_is_of_vectors_and_factors(model, factors):
    one, other = (LoraAdapter.of(factors[seed], model.config, "cpu") for seed in (1, 2))
    vectors = PromptVectors.of(torch.ones(2, 32))
    tunings = [
        Tuning(),
        Tuning(vectors),
        Tuning(None, one),
        Tuning(None, other),
        Tuning(vectors, one),
    ]
    salts = [tuning.salt(reads_vectors=True) for tuning in tunings]
    assert len(set(salts)) == len(salts)
    assert salts[0] == 0
    assert all(salt.bit_length() <= 128 for salt in salts)
    assert tunings[4].salt(reads_vectors=False) == salts[2]
    scaled = {name: 2 * factor for name, factor in factors[1].items()}
    assert LoraAdapter.of(scaled, model.config, "cpu").salt != one.salt


def test_rows_are_grouped_by_adapter_and_each_projection_takes_its_own(model, factors):
    """Rows of three adapters, one of which changes the last layer only, and rows without one."""
    every, last = factors[1], {n: f for n, f in factors[2].items() if n.startswith("1.up")}
    adapters = [LoraAdapter.of(one, model.config, "cpu").products for one in (every, last, every)]
    owners = np.array([1, -1, 0, 2, 0, -1, 1])
    rows = AdaptedRows(tuple(adapters), owners)
    assert rows.rows.tolist() == [2, 4, 0, 6, 3]
    assert rows.plain.tolist() == [1, 5]
    first = rows.added(0).at(Place.UP)
    assert first.rows.rows.tolist() == [2, 4, 3]
    assert first.rows.plain.tolist() == [0, 1, 5, 6]
    assert rows.added(1).at(Place.UP).rows is rows
    lone = AdaptedRows(tuple(adapters[1:2]), owners.clip(max=0))
    assert lone.added(0).at(Place.UP) is None
    groups = rows.added(1).groups(Place.UP)
    assert [(group.begin, group.end) for group in groups] == [(0, 2), (2, 4), (4, 5)]
    assert rows.within(torch.tensor([1, 5])) is None
    assert rows.within(torch.tensor([1, 3, 6])).rows.tolist() == [2, 1]
