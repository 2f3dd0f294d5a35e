"""A model is verified at its first start; a damaged one does not serve."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.verdicts import Verdict, recall_verdict, remember_verdict
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.engine.errors import CannotComputeError
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.verify.first_start import (
    FEWEST_TOKENS,
    MOST_LAYERS,
    MOST_TOKENS,
    layer_budget,
    token_budget,
    verify_first_start,
)
from nightjar.gpu_worker.worker.flights import LauncherError
from nightjar.gpu_worker.worker.starting import unverified
from nightjar.kernels.cache_folder import cache_folder as kernels_folder
from nightjar.pipeline.settings import Settings

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


@pytest.fixture(autouse=True, name="cache")
def own_cache(tmp_path, monkeypatch):
    # The compiled kernels stay where they are.
    monkeypatch.setenv("NIGHTJAR_KERNEL_CACHE", str(kernels_folder()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nightjar" / "verified"


@pytest.fixture(scope="module", name="weights")
def demo_weights():
    return load_file(DEMO / "model.safetensors")


def damaged_model(weights, folder, change) -> ModelDirectory:
    shutil.copytree(DEMO, folder)
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    change(changed)
    save_file(
        {name: tensor.contiguous() for name, tensor in changed.items()},
        folder / "model.safetensors",
    )
    return ModelDirectory.open(folder)


def engine_of(directory, kv_cache_bytes=16 << 20):
    config = EngineConfig(kv_cache_bytes=kv_cache_bytes)
    return Engine(load_model(directory, "fp32"), directory.tokenizer().token_bytes, config)


def computed_tokens(engine):
    return engine.statistics().counters.rank_tokens


def table_of_another_order(weights):
    table = weights["transformer.wte.weight"]
    weights["transformer.wte.weight"] = torch.cat((table[4096:], table[:4096]))


def values_in_another_order(weights):
    """Two heads of values change places in one layer: too little for the loss to show."""
    name = "transformer.h.3.attn.c_attn.weight"
    parts = list(weights[name].chunk(9, dim=1))
    parts[6], parts[7] = parts[7], parts[6]
    weights[name] = torch.cat(parts, dim=1)


def numbers_lost(weights):
    weights["transformer.ln_f.weight"][3] = float("nan")


def test_a_sound_model_is_verified_once(cache):
    directory = ModelDirectory.open(DEMO)
    engine = engine_of(directory)
    verify_first_start(directory, engine, "f" * 64)
    spent = computed_tokens(engine)
    assert 0 < spent <= 2 * MOST_TOKENS
    assert recall_verdict("f" * 64) == Verdict(is_sound=True, text="")
    verify_first_start(directory, engine, "f" * 64)
    assert computed_tokens(engine) == spent
    assert engine.statistics().gauges.resting_blocks == 0
    assert [entry.name for entry in cache.iterdir()] == [f"{'f' * 64}.json"]


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (table_of_another_order, "loss: loss "),
        (values_in_another_order, "value-output: the order of rows may be wrong in layer 3"),
        (numbers_lost, "loss: loss inf"),
    ],
)
def test_a_damaged_model_does_not_serve(change, check, weights, tmp_path):
    directory = damaged_model(weights, tmp_path / "model", change)
    engine = engine_of(directory)
    with pytest.raises(CannotComputeError) as refused:
        verify_first_start(directory, engine, directory.fingerprint)
    assert check in str(refused.value)
    assert f"`nightjar verify {directory.path}` checks all of it" in str(refused.value)
    assert "--verify off" in str(refused.value)
    assert not engine.has_work
    spent = computed_tokens(engine)
    with pytest.raises(CannotComputeError, match="is not in order"):
        verify_first_start(directory, engine, directory.fingerprint)
    assert computed_tokens(engine) == spent


def test_a_cache_without_room_for_a_text_is_no_damage():
    directory = ModelDirectory.open(DEMO)
    engine = engine_of(directory, kv_cache_bytes=1 << 20)
    verify_first_start(directory, engine, "e" * 64)
    assert recall_verdict("e" * 64) == Verdict(is_sound=True, text="")


def test_the_work_is_bounded_by_the_size_of_the_model():
    assert token_budget(2_000_000) == MOST_TOKENS
    assert FEWEST_TOKENS < token_budget(1_300_000_000) < MOST_TOKENS
    assert token_budget(70_000_000_000) == FEWEST_TOKENS
    small = ModelDirectory.open(DEMO).config
    assert layer_budget(small) == MOST_LAYERS
    medium = replace(small, hidden_size=1024, intermediate_size=4096, n_heads=16, n_kv_heads=16)
    assert layer_budget(medium) == 3
    assert layer_budget(replace(medium, hidden_size=8192)) == 0


def test_what_was_verified_by_other_checks_or_is_broken_is_not_recalled(cache):
    remember_verdict("d" * 64, Verdict(is_sound=True, text=""))
    (entry,) = cache.iterdir()
    entry.write_text(entry.read_text().replace('"checks": 1', '"checks": 0'))
    assert recall_verdict("d" * 64) is None
    entry.write_text("{")
    assert recall_verdict("d" * 64) is None


def test_the_settings_say_whether_a_model_is_verified():
    directory = ModelDirectory.open(DEMO)
    assert unverified(Settings.read(verify="auto"), directory) == directory.fingerprint
    assert not unverified(Settings.read(verify="off"), directory)
    assert not unverified(Settings.read(verify="auto", engine="fake"), directory)
    remember_verdict(directory.fingerprint, Verdict(is_sound=False, text="loss"))
    with pytest.raises(LauncherError, match="is not in order: loss"):
        unverified(Settings.read(verify="auto"), directory)
    assert not unverified(Settings.read(verify="off"), directory)
    remember_verdict(directory.fingerprint, Verdict(is_sound=True, text=""))
    assert not unverified(Settings.read(verify="auto"), directory)
