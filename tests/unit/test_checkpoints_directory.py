"""Model directories that are whole, and every way of not being."""

import json
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from nightjar import kernels
from nightjar.checkpoints import (
    CheckpointError,
    ModelDirectory,
    Tokenizer,
)
from nightjar.checkpoints.families import READERS
from nightjar.checkpoints.weights import TENSOR_NAMES
from nightjar.gpu_worker.models import load_model
from tests.models import Gpt2Shape, save_gpt2


@pytest.fixture
def model(tmp_path):
    return save_gpt2(tmp_path / "model", Gpt2Shape(n_inner=100))


def change_config(model, **changes):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(model):
    with pytest.raises(CheckpointError) as caught:
        ModelDirectory.open(model)
    return str(caught.value)


def weight_files(directory):
    return [header.path.name for header in directory.headers]


def test_a_whole_directory(model):
    directory = ModelDirectory.open(model)
    assert directory.name == "model"
    assert weight_files(directory) == ["model.safetensors"]
    config = directory.config
    assert (config.family, config.vocab_size, config.context_length) == ("gpt2", 512, 128)
    assert (config.n_heads, config.head_size, config.intermediate_size) == (4, 8, 100)
    assert config.attention_scales == (8**-0.5,) * 2
    assert config.eos_token_ids == (0,)
    assert config.activation == "gelu_tanh"


@pytest.mark.parametrize("key", ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head"])
def test_a_missing_size_is_refused(model, key):
    config = json.loads((model / "config.json").read_text())
    del config[key]
    (model / "config.json").write_text(json.dumps(config))
    message = refusal(model)
    assert f"{key} is missing" in message
    assert "config.json" in message


def test_needs_no_torch():
    code = "import sys, nightjar.checkpoints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_eos_from_generation_config(model):
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 0]}')
    assert ModelDirectory.open(model).config.eos_token_ids == (3, 0)
    (model / "generation_config.json").write_text('{"eos_token_id": null}')
    assert ModelDirectory.open(model).config.eos_token_ids == (0,)
    (model / "generation_config.json").write_text('{"eos_token_id": "<|end|>"}')
    assert "generation_config.json" in refusal(model)


def test_no_directory(tmp_path):
    assert "no such directory" in refusal(tmp_path / "nowhere")


def test_no_config(model):
    (model / "config.json").unlink()
    assert "config.json" in refusal(model)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00" * 100, "[" * 100_000])
def test_config_that_is_no_object(model, content):
    (model / "config.json").write_text(content)
    assert "config.json" in refusal(model)


@pytest.mark.parametrize("key", ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head"])
@pytest.mark.parametrize("value", [0, -3, 1e300, 10**30, "12", None, True, 1.5])
def test_absurd_sizes(model, key, value):
    change_config(model, **{key: value})
    message = refusal(model)
    assert key in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_head": 5}, "multiple"),
        ({"model_type": "mamba"}, "'mamba' is not supported: gpt2"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["gpt2"]}, "model_type"),
        ({"add_cross_attention": True}, "cross_attention"),
        ({"activation_function": "quick_gelu"}, "quick_gelu"),
        ({"activation_function": ["gelu"]}, "activation_function"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon"),
        ({"eos_token_id": -1}, "eos_token_id"),
    ],
)
def test_what_cannot_be_computed_is_refused(model, changes, words):
    change_config(model, **changes)
    assert words in refusal(model)


def test_no_tokenizer(model):
    (model / "tokenizer.json").unlink()
    message = refusal(model)
    assert "tokenizer.json" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1])
def test_truncated_weights(model, keep):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = refusal(model)
    assert "model.safetensors" in message
    assert "truncated" in message


def header_with(path, change):
    """Rewrite a file's header by a function of its text."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = change(raw[8 : 8 + length])
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


def edited(change):
    def inner(raw):
        header = json.loads(raw)
        change(header["transformer.wte.weight"])
        return json.dumps(header).encode()

    return inner


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: b"x" + raw[1:],
        lambda raw: b"[]",
        lambda raw: b"{}",
        lambda raw: b'{"w": 3}',
        lambda raw: b'{"w": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}',
        edited(lambda entry: entry.update(shape=[10**18, 10**18])),
        edited(lambda entry: entry.update(shape=[-1, 4])),
        edited(lambda entry: entry.update(dtype="F31")),
        edited(lambda entry: entry.update(data_offsets=[0, 10**15])),
        edited(lambda entry: entry.update(data_offsets=[4, 0])),
    ],
)
def test_damaged_headers(model, change):
    header_with(model / "model.safetensors", change)
    message = refusal(model)
    assert "model.safetensors" in message
    assert "again" in message


def test_a_header_of_absurd_length(model):
    path = model / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**63) + path.read_bytes()[8:])
    assert "truncated or damaged" in refusal(model)


def test_pickles_are_refused_by_name(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    message = refusal(model)
    assert "pytorch_model.bin" in message
    assert "convert" in message


def test_pickles_beside_safetensors_are_ignored(model):
    (model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert weight_files(ModelDirectory.open(model)) == ["model.safetensors"]


def test_no_weights(model):
    (model / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(model)


def shard(model):
    """Cut the single file in two, with an index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, str(model / file))
        weight_map |= dict.fromkeys(part, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_load_like_one_file(model):
    whole = load_model(ModelDirectory.open(model), "fp32")
    shard(model)
    directory = ModelDirectory.open(model)
    assert len(weight_files(directory)) == 2
    parts = load_model(directory, "fp32")
    ids = torch.arange(whole.config.vocab_size)
    tables = [kernels.embed(ids, ids, one.weights.tokens, None) for one in (parts, whole)]
    assert torch.equal(*tables)
    assert torch.equal(parts.weights.layers[1].up.bias, whole.weights.layers[1].up.bias)


def test_a_missing_shard(model):
    shard(model)
    (model / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(model)


def test_shards_without_their_index(model):
    shard(model)
    (model / "model.safetensors.index.json").unlink()
    assert "restore the index" in refusal(model)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "weights.bin", ""])
def test_an_index_that_leads_elsewhere(model, name):
    shard(model)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": name}}))
    assert "not a safetensors file beside the index" in refusal(model)


def test_shapes_that_do_not_match_the_config(model):
    change_config(model, n_inner=101)
    message = refusal(model)
    assert "h.0.mlp.c_fc.weight" in message
    assert "[32, 100]" in message
    assert "[32, 101]" in message


def test_missing_tensors(model):
    change_config(model, n_layer=3)
    assert "'h.2.ln_1.weight'" in refusal(model)


def test_weights_that_are_no_floats(model):
    path = model / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, str(path))
    assert "I8" in refusal(model)


def test_one_list_of_families():
    assert set(READERS) == set(TENSOR_NAMES)


def test_the_chat_template(model):
    assert ModelDirectory.open(model).chat_template() is None
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    template = ModelDirectory.open(model).chat_template()
    assert template.render([{"role": "user", "content": "a"}]) == "a"


def test_the_tokenizer_is_read_once(model, monkeypatch):
    directory = ModelDirectory.open(model)
    monkeypatch.setattr(Tokenizer, "read", None)
    assert directory.tokenizer() is directory.tokenizer()


@pytest.mark.parametrize("content", ["{}", '{"model": {"type": "BPE"}}', "nothing"])
def test_a_tokenizer_that_cannot_be_used(model, content):
    (model / "tokenizer.json").write_text(content)
    assert "tokenizer.json" in refusal(model)


def test_an_unknown_dtype(model):
    with pytest.raises(ValueError, match="int4"):
        load_model(ModelDirectory.open(model), "int4")
