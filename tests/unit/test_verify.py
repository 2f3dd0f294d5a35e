"""`nightjar verify` calls the demo model sound, and every kind of mixed-up weights not."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.convert import Conversion, convert
from nightjar.checkpoints.precision_plan import PrecisionPlan
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.verify.agreement import agreement, answers
from nightjar.gpu_worker.verify.losses import measure_losses
from nightjar.gpu_worker.verify.peaks import WatchedDecoder
from nightjar.gpu_worker.verify.report import judge_losses, judge_peaks
from nightjar.gpu_worker.verify.sample_texts import TEXTS
from nightjar.gpu_worker.verify.verifying import verify
from tests.megatron_writer import Layout, write_checkpoint

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
HEADS, SIZE, HIDDEN, INNER, LAYERS = 3, 64, 192, 768, 4


@pytest.fixture(scope="module", name="weights")
def demo_weights():
    return load_file(DEMO / "model.safetensors")


def copied(weights, folder, change=lambda _: None, config=None) -> ModelDirectory:
    """The demo model with changed weights."""
    shutil.copytree(DEMO, folder)
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    change(changed)
    save_file({n: t.contiguous() for n, t in changed.items()}, folder / "model.safetensors")
    if config:
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(known | config))
    return ModelDirectory.open(folder)


def blocks_moved(tensor, dim, size, heads=None):
    """The first two blocks of a dimension change places."""
    order = torch.arange(tensor.shape[dim])
    first, second = order[:size].clone(), order[size : 2 * size].clone()
    order[:size], order[size : 2 * size] = second, first
    return tensor.index_select(dim, order)


def part(number, change):
    """A change of the queries (0), keys (1) or values (2) of every layer, weight and bias."""

    def run(weights):
        for layer in range(LAYERS):
            for kind in ("weight", "bias"):
                name = f"transformer.h.{layer}.attn.c_attn.{kind}"
                parts = list(weights[name].chunk(3, dim=-1))
                parts[number] = change(parts[number])
                weights[name] = torch.cat(parts, dim=-1)

    return run


def every(name, change, layers=range(LAYERS)):
    def run(weights):
        for layer in layers:
            key = f"transformer.h.{layer}.{name}"
            weights[key] = change(weights[key])

    return run


def one(name, change):
    def run(weights):
        weights[name] = change(weights[name])

    return run


def channels_flipped(rows):
    return rows.unflatten(-1, (HEADS, SIZE)).flip(-1).flatten(-2)


def rows_of(version):
    """The fused rows of an old version, read as if they were of version 2."""

    def run(weights):
        for layer in range(LAYERS):
            for kind in ("weight", "bias"):
                name = f"transformer.h.{layer}.attn.c_attn.{kind}"
                q_k_v = weights[name].unflatten(-1, (3, HEADS, SIZE))
                order = {0: (-2, -3), 1: (-3, -1)}[version]
                weights[name] = q_k_v.transpose(*order).flatten(-3)

    return run


ATTENTION = {
    "heads of queries": part(0, lambda x: x.roll(SIZE, -1)),
    "heads of keys": part(1, lambda x: x.roll(SIZE, -1)),
    "heads of values": part(2, lambda x: x.roll(SIZE, -1)),
    "two heads of values": part(2, lambda x: blocks_moved(x, -1, SIZE)),
    "channels of queries": part(0, channels_flipped),
    "channels of values": part(2, channels_flipped),
    "inputs of the output projection": every(
        "attn.c_proj.weight", lambda x: blocks_moved(x, 0, SIZE)
    ),
    "rows of version 0": rows_of(0),
    "rows of version 1": rows_of(1),
}
NEURONS = {
    "shards of the first projection": every("mlp.c_fc.weight", lambda x: blocks_moved(x, 1, 192)),
    "shards of one layer": every("mlp.c_fc.weight", lambda x: blocks_moved(x, 1, 96), [2]),
    "inputs of the second projection": every("mlp.c_proj.weight", lambda x: x.flip(0)),
}
CHANNELS = {
    "outputs of the attention": every("attn.c_proj.weight", lambda x: x.roll(7, 1)),
    "inputs of the attention": every("attn.c_attn.weight", lambda x: x.flip(0)),
    "inputs of the first projection": every("mlp.c_fc.weight", lambda x: x.flip(0)),
    "outputs of the second projection": every("mlp.c_proj.weight", lambda x: x.roll(96, 1)),
    "columns of the table": one("transformer.wte.weight", lambda x: x.roll(96, 1)),
    "norms": every("ln_1.weight", lambda x: -x),
}
TABLES = {
    "shards of the vocabulary": one("transformer.wte.weight", lambda x: blocks_moved(x, 0, 4096)),
    "a table that is shifted by one row": one("transformer.wte.weight", lambda x: x.roll(1, 0)),
    "order of positions": one(
        "transformer.wpe.weight", lambda x: x[torch.randperm(512, generator=seeded())]
    ),
}
QUICK = ("two heads of values", "shards of one layer", "shards of the vocabulary")


def seeded():
    return torch.Generator().manual_seed(1)


def test_a_trained_model_is_sound(weights, tmp_path):
    report = verify(copied(weights, tmp_path / "model"), TEXTS, ["bf16"])
    assert report.is_sound, report.lines()
    assert {finding.verdict for finding in report.findings} == {"ok"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in (*ATTENTION, *NEURONS, *CHANNELS, *TABLES)
    ],
)
def test_mixed_up_weights_are_found(name, weights, tmp_path):
    change = {**ATTENTION, **NEURONS, **CHANNELS, **TABLES}[name]
    report = verify(copied(weights, tmp_path / "model", change), TEXTS, [])
    assert not report.is_sound, report.lines()


def test_the_place_of_a_swap_is_named(weights, tmp_path):
    directory = copied(weights, tmp_path / "model", NEURONS["shards of one layer"])
    [finding] = [f for f in verify(directory, TEXTS, []).findings if f.check == "up-down"]
    assert finding.text == (
        "the order of rows may be wrong in layer 2, blocks of neurons 0, 1, 2, 3"
    )


def test_untrained_weights_are_found(weights, tmp_path):
    def forget(changed):
        for name, tensor in changed.items():
            changed[name] = torch.randn(tensor.shape, generator=seeded()).to(tensor.dtype) * 0.02

    assert not verify(copied(weights, tmp_path / "model", forget), TEXTS, []).is_sound


@pytest.mark.slow
@pytest.mark.parametrize("version", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_converted_checkpoint_with_swapped_shards_is_found(version, swapped, weights, tmp_path):
    """The same after a real conversion: of the sound shards, and of two in each other's place."""
    from transformers import GPT2LMHeadModel  # noqa: PLC0415 - it takes seconds to import

    model = GPT2LMHeadModel.from_pretrained(DEMO, dtype=torch.float32)
    era = "encoder" if version == 3.0 else "transformer"
    layout = Layout(version=version, era=era, tp=3, padded_to=1)
    source = write_checkpoint(model, tmp_path / "source", replace(layout, padded_to=4))
    if swapped:
        first, second = (source / f"iter_0000100/mp_rank_0{rank}" for rank in (0, 1))
        first.rename(source / "aside")
        second.rename(first)
        (source / "aside").rename(second)
    convert(Conversion(source, tmp_path / "model", DEMO), lambda *_: None)
    report = verify(ModelDirectory.open(tmp_path / "model"), TEXTS, [])
    assert report.is_sound != swapped, report.lines()


def test_outputs_beyond_fp16_are_named(weights, tmp_path):
    def outliers(changed):
        """One neuron of layer 1 gives outputs beyond FP16, which its column makes small again."""
        bias = changed["transformer.h.1.mlp.c_fc.bias"]
        bias[5] = 60_000.0
        changed["transformer.h.1.mlp.c_fc.weight"][:, 5] *= 20_000.0
        changed["transformer.h.1.mlp.c_proj.weight"][5] = 0.0
        for name in list(changed):
            changed[name] = changed[name].float()

    directory = copied(weights, tmp_path / "model", outliers)
    watched = WatchedDecoder(load_model(directory, "fp32"))
    exact = answers(directory, watched, TEXTS[:3])
    [finding] = judge_peaks(watched.peaks())
    assert finding.verdict == "warning"
    assert "up of layer 1" in finding.text
    sound = answers(directory, load_model(directory, "fp32"), TEXTS[:3])
    assert sound == exact
    half = load_model(directory, "fp16", plan=PrecisionPlan("0"))
    found = agreement("fp16", exact, answers(directory, half, TEXTS[:3]))
    assert found.not_finite > 0


def test_scores_that_are_not_finite_are_a_failure(weights, tmp_path):
    def overflow(changed):
        changed["transformer.ln_f.weight"] = changed["transformer.ln_f.weight"].float() * 1e38
        changed["transformer.wte.weight"] = changed["transformer.wte.weight"].float() * 1e4

    directory = copied(weights, tmp_path / "model", overflow)
    losses = measure_losses(directory, load_model(directory, "fp32"), TEXTS)
    assert judge_losses(losses)[0].verdict == "failure"


def command(*arguments):
    words = [sys.executable, "-m", "nightjar", "verify", *map(str, arguments)]
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_the_command_with_a_text_of_ones_own(tmp_path):
    text = tmp_path / "sample.txt"
    text.write_text("\n\n".join(TEXTS[:6]))
    done = command(DEMO, "--text", text, "--precisions", "", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["is_sound"]
    assert found["losses"]["tokens"] > 100
    text.write_text("  \n")
    done = command(DEMO, "--text", text)
    assert done.returncode == 1
    assert "no text; write paragraphs" in done.stderr


def test_the_command_fails_for_a_damaged_model(weights, tmp_path):
    directory = copied(weights, tmp_path / "model", TABLES["shards of the vocabulary"])
    done = command(directory.path, "--precisions", "")
    assert done.returncode == 3
    assert "not in order; do not serve it" in done.stdout
