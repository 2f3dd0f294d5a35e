"""Megatron-LM checkpoints of every layout become the model that they were written from."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.checkpoints.convert import Conversion, convert
from tests.megatron_models import VOCABULARY, gpt2, llama, neox, qwen2, qwen3, save_whole_tokenizer
from tests.megatron_writer import Layout, write_checkpoint


@pytest.fixture(scope="module", name="tokenizer")
def whole_tokenizer(tmp_path_factory):
    return save_whole_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def converted(model, layout, tmp_path, tokenizer, **options):
    source = write_checkpoint(model, tmp_path / "checkpoint", layout)
    target = tmp_path / "converted"
    found = convert(Conversion(source, target, tokenizer, **options), lambda *_: None)
    return found, target


def logits_of(target, cls):
    loaded = cls.from_pretrained(target).eval()
    tokens = torch.arange(3, 43).reshape(2, 20) * 9 % VOCABULARY
    with torch.no_grad():
        return loaded(tokens).logits


def expected_logits(model):
    tokens = torch.arange(3, 43).reshape(2, 20) * 9 % VOCABULARY
    with torch.no_grad():
        return model(tokens).logits


CLASSIC = [
    pytest.param(Layout(version=None, era="transformer", old_arguments=True), id="0-one"),
    pytest.param(
        Layout(version=None, era="transformer", old_arguments=True, tp=2, old_format=True),
        id="0-two-ranks-before-zip",
    ),
    pytest.param(
        Layout(version=1.0, era="transformer", old_arguments=True, tp=2), id="1-two-ranks"
    ),
    pytest.param(Layout(version=2.0, era="transformer", tp=4, old_arguments=True), id="2-four"),
    pytest.param(Layout(version=3.0, era="transformer", pp=2), id="3-first-names"),
    pytest.param(Layout(version=3.0, era="encoder", tp=2, pp=2), id="3-encoder-2x2"),
    pytest.param(Layout(version=3.0, era="norm", tp=2, pp=2, vp=2), id="3-norm-virtual"),
    pytest.param(Layout(era="encoder", less_one=True), id="3-norms-less-one"),
]
CORE = [
    pytest.param(Layout(core=True), id="core"),
    pytest.param(Layout(core=True, fused_norms=True, tp=2, pp=2), id="core-fused-2x2"),
    pytest.param(Layout(core=True, tp=2, pp=2, vp=2), id="core-virtual"),
    pytest.param(Layout(core=True, fused_norms=True, hybrid=True), id="core-hybrid"),
]


@pytest.mark.parametrize("layout", [*CLASSIC, *CORE])
def test_learned_positions(layout, tmp_path, tokenizer):
    model = gpt2()
    found, target = converted(model, layout, tmp_path, tokenizer)
    assert found.family == "gpt2"
    assert found.padding_rows > 0
    close = {"rtol": 1e-5, "atol": 1e-5} if layout.less_one else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(logits_of(target, GPT2LMHeadModel), expected_logits(model), **close)


@pytest.mark.parametrize("layout", [Layout(pp=2, tp=2), Layout(core=True, tp=2)])
def test_a_head_of_its_own_and_the_exact_gelu(layout, tmp_path, tokenizer):
    model = gpt2(tied=False, activation="gelu")
    _, target = converted(model, layout, tmp_path, tokenizer)
    torch.testing.assert_close(
        logits_of(target, GPT2LMHeadModel), expected_logits(model), rtol=0, atol=0
    )


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(core=True, pp=2, fused_norms=True)])
def test_rotary_in_part_with_layer_norms(layout, tmp_path, tokenizer):
    model = neox()
    found, target = converted(model, layout, tmp_path, tokenizer)
    assert found.family == "gpt_neox"
    torch.testing.assert_close(
        logits_of(target, GPTNeoXForCausalLM), expected_logits(model), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("make", "cls", "family"),
    [
        (llama, LlamaForCausalLM, "llama"),
        (qwen2, Qwen2ForCausalLM, "qwen2"),
        (qwen3, Qwen3ForCausalLM, "qwen3"),
    ],
)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(core=True, tp=2, fused_norms=True),
        Layout(core=True, pp=2, interleaved_rotary=True),
    ],
)
def test_grouped_queries_with_gates(make, cls, family, layout, tmp_path, tokenizer):
    model = make()
    found, target = converted(model, layout, tmp_path, tokenizer)
    assert found.family == family
    torch.testing.assert_close(logits_of(target, cls), expected_logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_kept_as_they_are(dtype, tmp_path, tokenizer):
    model = gpt2().to(dtype)
    _, target = converted(model, Layout(tp=2), tmp_path, tokenizer)
    weights = load_file(target / "model.safetensors")
    assert torch.equal(weights["transformer.wte.weight"], model.transformer.wte.weight)
    assert {tensor.dtype for tensor in weights.values()} == {dtype}


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_another_dtype_is_rounded_as_pytorch_rounds(dtype, kind, tmp_path, tokenizer):
    model = gpt2()
    _, target = converted(model, Layout(tp=2), tmp_path, tokenizer, dtype=dtype)
    weights = load_file(target / "model.safetensors")
    for name, tensor in weights.items():
        assert torch.equal(tensor, model.state_dict()[name].to(kind)), name


def test_the_files_are_served(tmp_path, tokenizer):
    _, target = converted(gpt2(), Layout(tp=2), tmp_path, tokenizer)
    opened = ModelDirectory.open(target)
    assert opened.config.vocab_size == VOCABULARY
    assert opened.config.eos_token_ids == (
        json.loads((target / "config.json").read_text())["eos_token_id"],
    )


def test_device_tags_do_not_matter(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:3")
    model = gpt2()
    _, target = converted(model, Layout(tp=2), tmp_path, tokenizer)
    torch.testing.assert_close(
        logits_of(target, GPT2LMHeadModel), expected_logits(model), rtol=0, atol=0
    )


def test_arguments_may_be_given_where_there_are_none(tmp_path, tokenizer):
    model = gpt2()
    source = write_checkpoint(
        model, tmp_path / "checkpoint", Layout(version=None, era="transformer")
    )
    file = source / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    value = torch.load(file, weights_only=False)
    del value["args"]
    torch.save(value, file)
    job = Conversion(source, tmp_path / "converted", tokenizer)
    with pytest.raises(CheckpointError, match="--argument hidden_size=NUMBER"):
        convert(job, lambda *_: None)
    given = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_layers": 4,
        "max_position_embeddings": 48,
    }
    convert(replace(job, arguments=given), lambda *_: None)
    torch.testing.assert_close(
        logits_of(job.target, GPT2LMHeadModel), expected_logits(model), rtol=0, atol=0
    )


def test_a_wrong_version_can_be_corrected(tmp_path, tokenizer):
    """For twenty days in 2020 training wrote the rows of version 2.0 and no version."""
    model = gpt2()
    source = write_checkpoint(model, tmp_path / "checkpoint", Layout(version=2.0))
    file = source / "iter_0000100/mp_rank_00/model_optim_rng.pt"
    value = torch.load(file, weights_only=False)
    del value["checkpoint_version"]
    torch.save(value, file)
    for version, same in ((None, False), (2.0, True)):
        target = tmp_path / f"converted-{version}"
        convert(Conversion(source, target, tokenizer, version=version), lambda *_: None)
        logits = logits_of(target, GPT2LMHeadModel)
        assert torch.equal(logits, expected_logits(model)) == same
