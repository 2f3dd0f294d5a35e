"""The models of a planner: which request belongs to which."""

from pathlib import Path
from typing import Any

import pytest

from nightjar.checkpoints import CheckpointError
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import QueuedRequest
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.settings import Settings, SettingsError
from tests.models import Gpt2Shape, save_gpt2


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Gpt2Shape(vocab_size=300, n_positions=64)
    return save_gpt2(tmp_path_factory.mktemp("models") / "other", shape, seed=1)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'unused.db'}")


def opened(store: Store, **given: Any) -> PlanningModels:
    return PlanningModels.open(Settings.read(**given), store)


@pytest.fixture(scope="module")
def two(store: Store, tiny_model: Path, other_model: Path) -> PlanningModels:
    return opened(store, models=f"alpha={tiny_model}, org/beta={other_model}")


def requests(*models: str | None) -> list[QueuedRequest]:
    bodies = [{"prompt": "a"} | ({"model": name} if name else {}) for name in models]
    valid = [validate_body(RequestKind.GENERATE, body) for body in bodies]
    return [
        QueuedRequest(number, "job", number, f"row-{number}", RequestKind.GENERATE, body)
        for number, body in enumerate(valid)
    ]


def sort(models: PlanningModels, job_model: str, *named: str | None) -> dict[str, list[int]]:
    groups, refused = models.sort(job_model, requests(*named))
    found = {model.name: [item.id for item in group] for model, group in groups}
    return found | ({"refused": [id_ for id_, _ in refused]} if refused else {})


def test_each_request_goes_to_the_model_that_it_or_its_job_names(two: PlanningModels) -> None:
    given = ("alpha", None, "org/beta", "gamma", None)
    assert sort(two, "alpha", *given) == {"alpha": [0, 1, 4], "org/beta": [2], "refused": [3]}
    assert sort(two, "org/beta", *given) == {"alpha": [0], "org/beta": [1, 2, 4], "refused": [3]}
    _, [(_, error)] = two.sort("alpha", requests("gamma"))
    assert (error.code, error.param) == ("model_not_found", "body.model")
    assert error.message == (
        "the models served here are 'alpha', 'org/beta', not 'gamma'; name one of them"
    )


def test_the_only_model_computes_what_names_none(store: Store, tiny_model: Path) -> None:
    only = opened(store, model=tiny_model)
    assert sort(only, "older", None, "tiny", "older") == {"tiny": [0, 1], "refused": [2]}
    _, [(_, error)] = only.sort("tiny", requests("older"))
    assert "the model served here is 'tiny', not 'older'" in error.message
    assert "--accept-any-model" in error.message
    any_name = opened(store, model=tiny_model, accept_any_model=True)
    assert sort(any_name, "older", None, "tiny", "older") == {"tiny": [0, 1, 2]}


def test_models_that_cannot_be_used_are_named(
    store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="NIGHTJAR_MODELS"):
        opened(store)
    with pytest.raises(CheckpointError, match=r"the model 'b': .*nowhere: no such directory"):
        opened(store, models=f"a={tiny_model},b={tmp_path / 'nowhere'}")
    (tmp_path / "copy").symlink_to(tiny_model)
    with pytest.raises(SettingsError, match="'a' and 'b' are the same model"):
        opened(store, models=f"a={tiny_model},b={tmp_path / 'copy'}")
