"""Megatron-LM checkpoints of every layout become the model that they were written from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.checkpoints.convert import Conversion, convert
from tests.megatron_writer import Layout, write_checkpoint
from tests.models import save_tokenizer

VOCABULARY = 389
"""Tokens; the tables are padded, and no multiple of a power of two."""


def gpt2(tied=True, activation="gelu_new"):
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=48,
        n_embd=32,
        n_layer=4,
        n_head=4,
        activation_function=activation,
        tie_word_embeddings=tied,
    )
    return seeded(GPT2LMHeadModel, config)


def neox():
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_act="gelu_new",
        use_parallel_residual=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    )
    return seeded(GPTNeoXForCausalLM, config)


def rms(cls, config_cls, **own):
    config = config_cls(
        vocab_size=VOCABULARY,
        max_position_embeddings=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        **own,
    )
    return seeded(cls, config)


def llama():
    return rms(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2)


def qwen2():
    return rms(Qwen2ForCausalLM, Qwen2Config, num_key_value_heads=2)


def qwen3():
    return rms(Qwen3ForCausalLM, Qwen3Config, num_key_value_heads=2, head_dim=16)


def seeded(cls, config):
    """A model whose weights are all different, biases and norms included."""
    torch.manual_seed(11)
    model = cls(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.3)
    return model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, VOCABULARY)
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    assert size <= VOCABULARY
    extend(folder / "tokenizer.json", VOCABULARY)
    return folder


def extend(path: Path, size: int):
    """Add tokens until the tokenizer has so many."""
    content = json.loads(path.read_text())
    known = set(content["model"]["vocab"]) | {token["content"] for token in content["added_tokens"]}
    for index in range(len(known), size):
        content["model"]["vocab"][f"extra{index}"] = index
    path.write_text(json.dumps(content))


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
