"""What a forward pass asks of the kernels, beyond results, which the parity tests check."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nightjar import kernels
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig, GenerateRequest, SamplingParams
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.models.precision import precision_of
from nightjar.kernels.native.products import PanelWeight
from tests.models import Gpt2Shape, save_gpt2


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return ModelDirectory.open(save_gpt2(path, Gpt2Shape(n_layer=3, n_embd=48, n_head=3)))


def steps(directory, dtype, prompts):
    """Run the prompts to two tokens each, all together."""
    engine = Engine(load_model(directory, dtype), directory.tokenizer().token_bytes, EngineConfig())
    for number, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(number, prompt, SamplingParams(2, ignore_eos=True)))
    while engine.has_work:
        engine.step()


def test_in_the_last_layer_only_rows_that_are_read_attend(directory, monkeypatch):
    wanted, attend = [], kernels.attend

    def seen(*args):
        wanted.append(args[4].wanted)
        return attend(*args)

    monkeypatch.setattr(kernels, "attend", seen)
    monkeypatch.setattr(kernels, "run_layers", lambda *_: False)
    steps(directory, "fp32", [[5, 6, 7], [8, 9, 10, 11]])
    prompts, tokens = wanted[:3], wanted[3:]
    assert [rows if rows is None else rows.tolist() for rows in prompts] == [None, None, [2, 6]]
    assert tokens == [None, None, None]


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_layers_whose_rows_are_all_wanted_are_one_call(directory, dtype, monkeypatch):
    counts, run_layers = [], kernels.run_layers

    def seen(layers, count, *args):
        done = run_layers(layers, count, *args)
        counts.append(count if done else 0)
        return done

    monkeypatch.setattr(kernels, "run_layers", seen)
    steps(directory, dtype, [[5, 6, 7], [8, 9, 10, 11]])
    weights = load_model(directory, dtype).weights.layers[0]
    assert counts == ([2, 3] if isinstance(weights.qkv, PanelWeight) else [0, 0])


class Dispatched(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def test_a_decode_step_indexes_no_rows(directory):
    """From 4 rows on torch shares that with its own threads, and waking them costs the team of the
    compiled kernels its cores: all of a step of 4 took twice as long."""
    engine = Engine(
        load_model(directory, "fp32"), directory.tokenizer().token_bytes, EngineConfig()
    )
    for number in range(4):
        engine.submit(GenerateRequest(number, [5, 6 + number], SamplingParams(3, ignore_eos=True)))
    with Dispatched() as prefill:
        engine.step()
    with Dispatched() as decode:
        engine.step()
    assert engine.has_work
    indexing = {"aten.index.Tensor", "aten.index_select.default"}
    assert prefill.names & indexing  # of the last rows of prompts
    assert not decode.names & indexing


@pytest.mark.parametrize(
    ("dtype", "kept"), [("fp32", torch.float32), ("bf16", None), ("int8", torch.float16)]
)
def test_heads_are_kept_as_the_cache_keeps_them(directory, monkeypatch, dtype, kept):
    kept = kept or precision_of(dtype, "cpu").cache
    kinds, attend = set(), kernels.attend

    def seen(qkv, *args):
        out = attend(qkv, *args)
        kinds.update({qkv.dtype, out.dtype})
        return out

    monkeypatch.setattr(kernels, "attend", seen)
    monkeypatch.setattr(kernels, "run_layers", lambda *_: False)
    steps(directory, dtype, [[5, 6, 7]])
    assert kinds == {kept}


def test_halves_of_a_block_end_in_the_residual_stream(directory, monkeypatch):
    """Nothing is left for the norms to add where the kernels add it."""
    deltas, normed_linear = [], kernels.normed_linear

    def seen(residual, delta, *args):
        deltas.append(delta)
        return normed_linear(residual, delta, *args)

    monkeypatch.setattr(kernels, "normed_linear", seen)
    monkeypatch.setattr(kernels, "run_layers", lambda *_: False)
    steps(directory, "fp32", [[5, 6, 7]])
    compiled = kernels.native.build.library() is not None
    assert [delta is None for delta in deltas] == [True, compiled, compiled] * 2
