"""Which precision is chosen, and what a model loaded in int8 computes in."""

import itertools
import subprocess
import sys
from itertools import product
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.engine import Engine, EngineConfig, GenerateRequest, SamplingParams
from nightjar.gpu_worker.models import Decoder, load_model, precision
from nightjar.gpu_worker.models import chosen_dtype as chosen_dtype_module
from nightjar.gpu_worker.models.chosen_dtype import chosen_dtype
from nightjar.gpu_worker.models.precision import ADVANTAGE, PRECISIONS, Probe, fastest_dtype, probe
from nightjar.gpu_worker.shards.startup import StartUp, encode
from nightjar.kernels import native
from nightjar.kernels.native.build import SWITCH
from nightjar.kernels.native.float_linear import FloatPanelWeight
from nightjar.kernels.native.int8_linear import Int8PanelWeight
from nightjar.kernels.operands import HeadTable
from nightjar.kernels.reference.fp8_linear import Fp8Weight
from nightjar.kernels.reference.int8_linear import Int8Weight
from nightjar.kernels.reference.linear import FloatWeight
from nightjar.pipeline.settings import Settings
from tests.backends import require
from tests.models import Gpt2Shape, save_gpt2

FP32_S = 0.001


def planted(bf16_s: float):
    return lambda dtype: bf16_s if dtype == "bf16" else FP32_S


@pytest.mark.parametrize(
    ("bf16_s", "chosen"),
    [
        (FP32_S / 3, "bf16"),
        (FP32_S / (ADVANTAGE + 0.01), "bf16"),
        (FP32_S / (ADVANTAGE - 0.01), "fp32"),
        (FP32_S, "fp32"),
        (FP32_S * 4, "fp32"),
    ],
)
def test_bf16_is_chosen_where_it_is_clearly_faster(bf16_s, chosen):
    assert fastest_dtype(Probe(FP32_S, bf16_s)) == chosen


@pytest.mark.parametrize(("factor", "chosen"), [(0.5, "bf16"), (2.0, "fp32")])
@pytest.mark.parametrize("calm_from", range(0, 40, 3))
def test_a_busy_host_decides_nothing(factor, chosen, calm_from, monkeypatch):
    """Most of the time others compute: of 40 products in a row, five find a calm moment."""
    monkeypatch.setattr(precision, "_ROUNDS_APART_S", 0)
    calls = itertools.count()

    def disturbed(dtype):
        busy = (next(calls) - calm_from) % 40 >= 5
        return planted(FP32_S * factor)(dtype) * (10 if busy else 1)

    assert fastest_dtype(probe(disturbed)) == chosen


@pytest.mark.parametrize("slowed", ["fp32", "bf16"])
def test_a_disturbance_of_one_precision_that_outlasts_all_turns_decides_nothing(
    slowed, monkeypatch
):
    monkeypatch.setattr(precision, "_ROUNDS_APART_S", 0)
    calls = itertools.count()

    def disturbed(dtype):
        return planted(FP32_S / 2)(dtype) * (4 if dtype == slowed and next(calls) < 400 else 1)

    assert fastest_dtype(probe(disturbed)) == "bf16"


def test_both_dtypes_meet_the_same_moments(monkeypatch):
    monkeypatch.setattr(precision, "_ROUNDS_APART_S", 0)
    order = []
    probe(lambda dtype: order.append(dtype) or FP32_S)
    turns = [(dtype, len(list(products))) for dtype, products in itertools.groupby(order)]
    assert len(turns) >= 8
    assert len(turns) % 2 == 0
    assert len({length for _, length in turns}) == 1


@pytest.fixture
def instructions(monkeypatch):
    """A processor with instructions for bfloat16, whatever this one has."""
    monkeypatch.setattr(chosen_dtype_module, "computes_bfloat16", lambda: True)


SLOW_FP32, SLOW_BF16 = Probe(FP32_S, FP32_S / 2), Probe(FP32_S, FP32_S * 2)


def never() -> Probe:
    raise AssertionError("probed again")


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(("found", "chosen"), [(SLOW_FP32, "bf16"), (SLOW_BF16, "fp32")])
def test_a_choice_is_remembered(found, chosen, tmp_path):
    folder = tmp_path / "not yet there"
    assert chosen_dtype(folder, lambda: found) == chosen
    assert chosen_dtype(folder, never) == chosen
    assert len(list(folder.iterdir())) == 1


@pytest.mark.usefixtures("instructions")
def test_other_kernels_are_probed_again(tmp_path, monkeypatch):
    assert chosen_dtype(tmp_path, lambda: SLOW_FP32) == "bf16"
    monkeypatch.setattr(chosen_dtype_module, "identity", lambda: "another processor's")
    assert chosen_dtype(tmp_path, lambda: SLOW_BF16) == "fp32"


@pytest.mark.usefixtures("instructions")
def test_of_two_starts_at_once_the_first_choice_stands(tmp_path):
    def meanwhile() -> Probe:
        assert chosen_dtype(tmp_path, lambda: SLOW_FP32) == "bf16"
        return SLOW_BF16

    assert chosen_dtype(tmp_path, meanwhile) == "bf16"
    assert chosen_dtype(tmp_path, never) == "bf16"


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("broken", [b"", b"[]", b'{"dtype": "int4"}', b"\xff"])
def test_a_broken_note_is_written_again(tmp_path, broken):
    chosen_dtype(tmp_path, lambda: SLOW_FP32)
    (note,) = tmp_path.iterdir()
    note.write_bytes(broken)
    assert chosen_dtype(tmp_path, lambda: SLOW_BF16) == "fp32"
    assert chosen_dtype(tmp_path, never) == "fp32"


@pytest.mark.usefixtures("instructions")
def test_a_folder_that_takes_nothing_is_said(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert chosen_dtype(tmp_path / "file", lambda: SLOW_FP32) == "bf16"
    assert "cannot be remembered" in caplog.text


def test_fp32_where_the_processor_has_no_bf16(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(native.float_linear, "serves_bfloat16", lambda: False)
    assert chosen_dtype(tmp_path, never) == "fp32"


def test_the_probe_itself_chooses_one_of_the_two(tmp_path):
    threads = torch.get_num_threads()
    assert chosen_dtype(tmp_path) in ("fp32", "bf16")
    assert torch.get_num_threads() == threads


def test_every_precision_can_be_configured():
    for name in ("auto", *PRECISIONS):
        assert Settings(dtype=name).dtype == name


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    shape = Gpt2Shape(n_embd=48, n_head=4, vocab_size=611, tied=request.param)
    return ModelDirectory.open(save_gpt2(path, shape))


def test_int8_quantises_the_products_and_nothing_else(directory):
    model = load_model(directory, "int8")
    for layer in model.weights.layers:
        for weight in (layer.qkv, layer.attention_out, layer.up, layer.down):
            assert isinstance(weight, Int8Weight | Int8PanelWeight)
        assert layer.mlp_norm.weight.dtype == torch.float32
    assert isinstance(model.weights.head, Int8Weight | Int8PanelWeight)
    assert model.weights.tokens.dtype == model.dtype == torch.float32
    plain = load_model(directory, "fp32")
    assert isinstance(plain.weights.head, FloatWeight | FloatPanelWeight)


def test_fp8_quantises_the_products_but_not_the_lm_head(directory):
    model = load_model(directory, "fp8")
    for layer in model.weights.layers:
        for weight in (layer.qkv, layer.attention_out, layer.up, layer.down):
            assert isinstance(weight, Fp8Weight)
    assert isinstance(model.weights.head, FloatWeight)
    assert model.weights.head.rows_dtype == model.weights.tokens.dtype == torch.bfloat16
    assert model.dtype == model.cache_dtype == torch.bfloat16


@pytest.mark.parametrize("there", [True, False])
def test_bf16_rounds_the_products_alone_where_the_processor_has_them(directory, there, monkeypatch):
    """Rows and sums stay in FP32; elsewhere everything is kept in bfloat16."""
    if there and not native.float_linear.serves_bfloat16():
        pytest.skip("no instructions for bfloat16 that the kernels use")
    monkeypatch.setattr(native.float_linear, "serves_bfloat16", lambda: there)
    model = load_model(directory, "bf16")
    assert model.dtype == (torch.float32 if there else torch.bfloat16)
    assert model.cache_dtype == (torch.float16 if there else torch.bfloat16)
    for layer in model.weights.layers:
        for weight in (layer.qkv, layer.attention_out, layer.up, layer.down):
            stored = weight.panels if there else weight.data
            assert stored.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tied_embeddings_are_kept_once_in_panels(directory, dtype):
    weights = load_model(directory, dtype).weights
    require(dtype == "bf16" or isinstance(weights.head, FloatPanelWeight))
    if not isinstance(weights.head, FloatPanelWeight):
        pytest.skip("no instructions for bfloat16 that the kernels use")
    tied = directory.config.tied_embeddings
    assert isinstance(weights.tokens, HeadTable) == tied
    assert not tied or weights.tokens.head is weights.head


def test_an_unknown_dtype_is_refused_with_the_known_ones(directory):
    with pytest.raises(ValueError, match="dtype 'int4': one of fp64, fp32, bf16, fp16, int8"):
        load_model(directory, "int4")


def greedy(model: Decoder, directory: ModelDirectory, prompts: list[list[int]]):
    """Tokens of each prompt, all computed together, and every row's logits by its tokens."""
    rows = []
    plain = model.logits

    def written(hidden):
        rows.append(plain(hidden))
        return rows[-1].clone()

    model.logits = written  # type: ignore[method-assign]
    engine = Engine(model, directory.tokenizer().token_bytes, EngineConfig())
    for number, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(number, prompt, SamplingParams(9, ignore_eos=True)))
    texts = {}
    while engine.has_work:
        texts |= {result.request_id: result.token_ids for result in engine.step()}
    del model.logits
    return [texts[i] for i in range(len(prompts))], torch.cat(rows)


def test_int8_results_are_the_same_bits_in_any_company(directory):
    """Stronger than the products' own test: every logit of each text, alone and among others."""
    model = load_model(directory, "int8")
    prompts = [[3 + i, 40 + i, *range(50, 50 + 7 * i)] for i in range(9)]
    texts, logits = greedy(model, directory, prompts)
    together = {row.numpy().tobytes() for row in logits}
    for prompt, text in zip(prompts, texts, strict=True):
        alone, rows = greedy(model, directory, [prompt])
        assert alone == [text]
        assert all(row.numpy().tobytes() in together for row in rows)


def test_int8_scores_stay_near_fp32(directory):
    exact, int8 = (load_model(directory, dtype) for dtype in ("fp32", "int8"))
    prompts = [[a, b, 17, 300, 22] for a, b in product((5, 90, 400), (8, 250))]
    # The first logits of each prompt, before texts could part.
    first = len(prompts)
    _, expected = greedy(exact, directory, prompts)
    _, found = greedy(int8, directory, prompts)
    error = (found[:first] - expected[:first]).pow(2).mean().sqrt()
    assert 0 < error < 0.05 * expected[:first].std()


def test_the_compute_process_says_which_dtype_it_took(tiny_model: Path):
    for asked, taken in (("auto", {"fp32", "bf16"}), ("int8", {"int8"})):
        ours, theirs = Pipe()
        fd = theirs.fileno()
        start = StartUp(ComputeConfig(tiny_model, dtype=asked, threads=1), fd)
        command = [sys.executable, "-m", "nightjar.gpu_worker.compute", encode(start)]
        with subprocess.Popen(command, pass_fds=[fd], stderr=subprocess.PIPE, text=True) as process:
            theirs.close()
            (ready,) = messages.decode_from_compute(ours.recv_bytes())
            assert isinstance(ready, messages.Ready)
            ours.close()
            _, log = process.communicate(timeout=60)
        assert ready.dtype in taken
        assert f" in {ready.dtype} after" in log
        assert process.returncode == 0


def test_a_wrong_choice_of_kernels_ends_the_load_with_its_reason(tiny_model: Path, monkeypatch):
    monkeypatch.setenv(SWITCH, "fast")
    ours, theirs = Pipe()
    fd = theirs.fileno()
    start = StartUp(ComputeConfig(tiny_model, dtype="fp32", threads=1), fd)
    command = [sys.executable, "-m", "nightjar.gpu_worker.compute", encode(start)]
    with subprocess.Popen(command, pass_fds=[fd]) as process:
        theirs.close()
        (failed,) = messages.decode_from_compute(ours.recv_bytes())
        ours.close()
        assert process.wait(timeout=60) == 1
    assert failed == messages.LoadFailed(
        message='NIGHTJAR_CPU_KERNELS=\'fast\': "auto", "native" or "torch"'
    )
