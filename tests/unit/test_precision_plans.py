"""Precision plans: models with planted outliers give fp32's greedy text in fp16 with their plan."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.checkpoints.precision_plan import PLAN_NAME, LayerPlan, PrecisionPlan, read_plan
from nightjar.gpu_worker.engine import Engine, EngineConfig, GenerateResult, RankResult
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.models.plan_rules import NO_PLAN, planned_precision
from nightjar.gpu_worker.verify.agreement import answers
from nightjar.gpu_worker.verify.peaks import FP16_MAX, WatchedDecoder
from nightjar.gpu_worker.verify.planning import plan_of
from nightjar.gpu_worker.verify.sample_texts import TEXTS
from nightjar.kernels.reference.scaled_rows import scaled_rows
from nightjar.requests import GenerateRequest, RankRequest, SamplingParams
from tests.shards import thread_ranks

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
LAYERS, RANKS = 4, 3
NONE = PrecisionPlan("0")
"""An empty plan, so that none is read from the directory."""


def block(weights, layer, name):
    return weights[f"transformer.h.{layer}.{name}"]


def values_of_uneven_scale(weights):
    """Values are 2^16 times as large, and what reads them as much smaller: the same function."""
    for kind in ("weight", "bias"):
        block(weights, 2, f"attn.c_attn.{kind}")[..., 384:] *= 2.0**16
    block(weights, 2, "attn.c_proj.weight").mul_(2.0**-16)


def queries_of_uneven_scale(weights):
    """Queries are large and keys small: the same function."""
    for kind in ("weight", "bias"):
        block(weights, 3, f"attn.c_attn.{kind}")[..., :192] *= 2.0**15
        block(weights, 3, f"attn.c_attn.{kind}")[..., 192:384] *= 2.0**-8
    for kind in ("weight", "bias"):
        block(weights, 3, f"attn.c_attn.{kind}")[..., 192:384] *= 2.0**-7


def neurons_of_uneven_scale(weights):
    """Eight neurons of layer 1 give a hundred thousand and more."""
    generator = torch.Generator().manual_seed(3)
    block(weights, 1, "mlp.c_fc.bias")[:8] = 100_000.0
    block(weights, 1, "mlp.c_fc.weight")[:, :8] *= 20_000.0
    small = torch.randn(8, 192, generator=generator) * 2e-6
    block(weights, 1, "mlp.c_proj.weight")[:8] = small


def channel_of_uneven_scale(weights):
    """A channel of the normalised rows is large in layer 2, and what reads it as much smaller."""
    for kind in ("weight", "bias"):
        block(weights, 2, f"ln_2.{kind}")[11] *= 2.0**15
    block(weights, 2, "mlp.c_fc.weight")[11] *= 2.0**-15


def massive_stream(weights):
    """Layer 1 adds 150,000 to a channel of the residual stream, and layer 2 takes it away."""
    block(weights, 1, "mlp.c_proj.bias")[7] += 150_000.0
    block(weights, 2, "mlp.c_proj.bias")[7] -= 150_000.0


PLANTED = {
    "values": (values_of_uneven_scale, 2, "value"),
    "queries": (queries_of_uneven_scale, 3, "query"),
    "neurons": (neurons_of_uneven_scale, 1, "up"),
    "channel": (channel_of_uneven_scale, 2, "mlp_input"),
}


OTHERS = ("queries", "channel")


@pytest.fixture(scope="module", name="weights")
def demo_weights():
    return {n: t.float() for n, t in load_file(DEMO / "model.safetensors").items()}


def planted(weights, folder, change) -> ModelDirectory:
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    change(changed)
    save_file(changed, folder / "model.safetensors")
    return ModelDirectory.open(folder)


def peaks_of(directory):
    watched = WatchedDecoder(load_model(directory, "fp32"))
    answers(directory, watched, TEXTS)
    return watched.peaks()


def prompts(directory):
    return [ids[: 3 + 5 * i] for i, ids in enumerate(directory.tokenizer().encode_batch(TEXTS))]


def greedy(decoder, directory, asked, **config):
    """The greedy tokens of each prompt, computed together; None where scores are not finite."""
    config = EngineConfig(**({"kv_cache_bytes": 64 << 20} | config))
    engine = Engine(decoder, directory.tokenizer().token_bytes, config)
    sampling = SamplingParams(12, ignore_eos=True)
    for number, ids in enumerate(asked):
        engine.submit(GenerateRequest(number, ids, sampling))
    found = {}
    while len(found) < len(asked):
        for result in engine.step():
            texts = result.outputs if isinstance(result, GenerateResult) else None
            found[result.request_id] = None if texts is None else texts[0].token_ids
    return [found[number] for number in range(len(asked))]


@pytest.mark.parametrize(
    "name", ["values", "neurons", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)]
)
def test_outliers_in_fp16_give_the_text_of_fp32_under_the_plan(name, weights, tmp_path):
    change, layer, entry = PLANTED[name]
    directory = planted(weights, tmp_path / "model", change)
    peaks = peaks_of(directory)
    assert max(peak.largest for peak in peaks if peak.layer == layer) > 1e5
    plan = plan_of(peaks, directory.plain_fingerprint)
    assert getattr(plan.fp16[layer], entry)
    asked = prompts(directory)
    expected = greedy(load_model(directory, "fp32"), directory, asked)
    half = load_model(directory, "fp16", plan=plan)
    assert greedy(half, directory, asked) == expected
    # The same alone, in small steps, and in shards.
    assert [greedy(half, directory, [ids])[0] for ids in asked] == expected
    assert greedy(half, directory, asked, max_step_tokens=64) == expected
    plan.write(directory.path)
    with thread_ranks(ModelDirectory.open(directory.path), RANKS) as rank_zero:
        assert greedy(rank_zero.load("fp16"), directory, asked) == expected
    without = greedy(load_model(directory, "fp16", plan=NONE), directory, asked)
    wrong = sum(ours != theirs for ours, theirs in zip(without, expected, strict=True))
    assert wrong > len(asked) // 2, without


def test_the_residual_stream_is_protected_without_a_plan(weights, tmp_path):
    directory = planted(weights, tmp_path / "model", massive_stream)
    asked = prompts(directory)
    expected = greedy(load_model(directory, "fp32"), directory, asked)
    half = load_model(directory, "fp16", plan=NONE)
    assert greedy(half, directory, asked) == expected
    assert [greedy(half, directory, [ids])[0] for ids in asked] == expected


def test_a_sound_model_needs_no_plan_and_has_the_text_of_fp32():
    directory = ModelDirectory.open(DEMO)
    plan = plan_of(peaks_of(directory), directory.plain_fingerprint)
    assert not plan.concerns("fp16")
    assert not plan.concerns("int8")
    assert plan.precision("fp16") == "fp16"
    asked = prompts(directory)
    half = load_model(directory, "fp16")
    assert greedy(half, directory, asked) == greedy(load_model(directory, "fp32"), directory, asked)


def scores(decoder, directory, asked):
    """The mean likelihood of each text's second half, computed together."""
    config = EngineConfig(kv_cache_bytes=64 << 20)
    engine = Engine(decoder, directory.tokenizer().token_bytes, config)
    for number, ids in enumerate(asked):
        engine.submit(RankRequest(number, ids[: len(ids) // 2], [ids[len(ids) // 2 :]]))
    found = {}
    while len(found) < len(asked):
        for result in engine.step():
            found[result.request_id] = (
                result.mean_nll[0] if isinstance(result, RankResult) else result.code
            )
    return [found[number] for number in range(len(asked))]


def test_whether_a_request_overflows_does_not_depend_on_its_company(weights, tmp_path):
    """A neuron that passes 65,504 for some texts only; scores are the same to the last bit."""

    def sometimes(changed):
        block(changed, 1, "mlp.c_fc.weight")[:, 3] *= 40_000.0

    directory = planted(weights, tmp_path / "model", sometimes)
    asked = prompts(directory)
    half = load_model(directory, "fp16", plan=NONE)
    together = scores(half, directory, asked)
    assert "not_finite" in together
    assert any(score != "not_finite" for score in together)
    assert [scores(half, directory, [ids])[0] for ids in asked] == together
    assert scores(half, directory, asked[::-1])[::-1] == together


def test_a_neuron_beyond_int8s_range_is_computed_in_fp32(weights, tmp_path):
    def outlier(changed):
        block(changed, 1, "mlp.c_fc.bias")[5] = 4e7
        block(changed, 1, "mlp.c_proj.weight")[5] = 1e-9

    directory = planted(weights, tmp_path / "model", outlier)
    plan = plan_of(peaks_of(directory), directory.plain_fingerprint)
    assert plan.int8 == (1,)
    asked = prompts(directory)
    expected = greedy(load_model(directory, "fp32"), directory, asked)
    found = greedy(load_model(directory, "int8", plan=plan), directory, asked)
    same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    assert same >= len(asked) - 2
    assert None not in found


def test_the_plan_is_stored_beside_the_model_and_named(weights, tmp_path):
    directory = planted(weights, tmp_path / "model", neurons_of_uneven_scale)
    before = directory.fingerprint
    plan = PrecisionPlan(directory.plain_fingerprint, {1: LayerPlan(up=True, key=3)}, (2,))
    plan.write(directory.path)
    again = ModelDirectory.open(directory.path)
    assert again.plan() == plan
    assert again.plain_fingerprint == before != again.fingerprint
    assert planned_precision(again, "fp16") == f"fp16+{plan.name}"
    assert planned_precision(again, "int8") == f"int8+{plan.name}"
    assert planned_precision(again, "fp32") == "fp32"
    plan.write(directory.path)  # the same content is no other plan
    other = replace(plan, int8=())
    with pytest.raises(CheckpointError, match="another plan is there; give --overwrite"):
        other.write(directory.path)
    assert other.name != plan.name
    other.write(directory.path, overwrite=True)
    assert ModelDirectory.open(directory.path).plan() == other
    assert not [file for file in directory.path.iterdir() if file.name.startswith("tmp")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format": 2}, "format is 2; this version reads 1"),
        ({"model": 3}, "model must be a text"),
        ({"int8": [4]}, "int8 must be a list of layers below 4"),
        ({"fp16": {"7": {}}}, "fp16.7: expected an object for a layer below 4"),
        ({"fp16": {"1": {"down": True}}}, "fp16.1.down: unknown; expected attention_input"),
        ({"fp16": {"1": {"up": 1}}}, "fp16.1.up is 1; expected true or false"),
        ({"fp16": {"1": {"key": 99}}}, "fp16.1.key is 99; expected a number from 0 to 24"),
        ({}, "made for other files than these"),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused(content, message, tmp_path):
    shutil.copytree(DEMO, tmp_path / "model")
    sound = {"format": 1, "model": "0" * 64, "fp16": {"1": {"up": True}}, "int8": []}
    (tmp_path / "model" / PLAN_NAME).write_text(json.dumps(sound | content))
    with pytest.raises(CheckpointError, match=message) as refused:
        load_model(ModelDirectory.open(tmp_path / "model"), "fp16")
    assert PLAN_NAME in str(refused.value)


def test_without_a_file_there_is_no_plan(tmp_path):
    assert read_plan(tmp_path, 4) is None
    assert NO_PLAN.precision("fp16") == "fp16"


def test_scaled_rows_are_exact_powers_of_two():
    rows = torch.tensor([[1.0, -3.0], [1e6, 2.0**-3], [65_504.0, 1.0], [0.0, 0.0]])
    halves, factors = scaled_rows(rows)
    assert halves.dtype == torch.float16
    assert factors.flatten().tolist() == [1.0, 32.0, 2.0, 1.0]
    assert torch.equal(halves[0].float(), rows[0])
    assert float(halves.abs().max()) <= FP16_MAX / 2
    assert torch.allclose(halves.float() * factors, rows, rtol=2**-11)
