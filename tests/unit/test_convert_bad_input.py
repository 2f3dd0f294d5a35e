"""Checkpoints that cannot be converted are refused with the file and the reason."""

import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from nightjar.checkpoints import CheckpointError
from nightjar.checkpoints.convert import Conversion, convert, writing
from nightjar.checkpoints.convert.torch_file import open_torch_file
from tests.megatron_models import extend, gpt2, save_whole_tokenizer
from tests.megatron_writer import Layout, write_checkpoint

SHARD = "iter_0000100/mp_rank_{:02d}/model_optim_rng.pt"


@pytest.fixture(scope="module", name="tokenizer")
def whole_tokenizer(tmp_path_factory):
    return save_whole_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(name="source")
def two_ranks(tmp_path):
    return write_checkpoint(gpt2(), tmp_path / "checkpoint", Layout(tp=2))


def change(path: Path, edit):
    value = torch.load(path, weights_only=False)
    edit(value)
    torch.save(value, path)


def refused(source, tmp_path, tokenizer, **options) -> str:
    with pytest.raises(CheckpointError) as error:
        convert(Conversion(source, tmp_path / "converted", tokenizer, **options), lambda *_: None)
    return str(error.value)


def layers(value):
    return value["model"]["language_model"]["encoder"]


def test_a_missing_shard(source, tmp_path, tokenizer):
    file = source / SHARD.format(1)
    file.unlink()
    file.parent.rmdir()
    assert "shards are missing: mp_rank_01" in refused(source, tmp_path, tokenizer)


def test_a_folder_without_its_file(source, tmp_path, tokenizer):
    (source / SHARD.format(1)).unlink()
    assert "mp_rank_01: no model_optim_rng.pt" in refused(source, tmp_path, tokenizer)


@pytest.mark.parametrize("key", ["iteration", "checkpoint_version"])
def test_shards_of_different_checkpoints(key, source, tmp_path, tokenizer):
    change(source / SHARD.format(1), lambda value: value.update({key: 2.0}))
    message = refused(source, tmp_path, tokenizer)
    assert f"mp_rank_01/model_optim_rng.pt: {key} is 2.0, but" in message


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_file(share, source, tmp_path, tokenizer):
    file = source / SHARD.format(1)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    assert "mp_rank_01/model_optim_rng.pt: " in refused(source, tmp_path, tokenizer)


def test_a_truncated_file_of_the_old_format(tmp_path, tokenizer):
    source = write_checkpoint(gpt2(), tmp_path / "checkpoint", Layout(old_format=True))
    file = source / SHARD.format(0)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - 1000])
    assert re.search("truncated or damaged at storage", refused(source, tmp_path, tokenizer))


def test_wrong_parallel_sizes(source, tmp_path, tokenizer):
    for rank in (0, 1):
        change(
            source / SHARD.format(rank),
            lambda value: setattr(value["args"], "tensor_model_parallel_size", 4),
        )
    assert "shards are missing: mp_rank_02, mp_rank_03" in refused(source, tmp_path, tokenizer)


def test_arguments_of_another_model(source, tmp_path, tokenizer):
    message = refused(source, tmp_path, tokenizer, arguments={"num_layers": 3})
    assert "hold 4 layers, but num_layers is 3" in message
    message = refused(source, tmp_path, tokenizer, arguments={"hidden_size": 64})
    assert "the arguments" in message


def test_a_vocabulary_of_another_model(source, tmp_path, tokenizer):
    change_vocabulary(tokenizer, tmp_path / "short", 200)
    assert "200 tokens" in refused(source, tmp_path, tmp_path / "short")
    change_vocabulary(tokenizer, tmp_path / "long", 500)
    assert "500 tokens, but the model's embedding table has 400 rows" in refused(
        source, tmp_path, tmp_path / "long"
    )


def change_vocabulary(tokenizer, folder, size):
    folder.mkdir()
    content = (tokenizer / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(content)
    if size > 389:
        extend(folder / "tokenizer.json", size)
        return
    found = json.loads(content)
    found["model"]["merges"] = []
    vocabulary = found["model"]["vocab"]
    found["model"]["vocab"] = {text: i for text, i in vocabulary.items() if i < size}
    (folder / "tokenizer.json").write_text(json.dumps(found))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_no_numbers(number, dtype, source, tmp_path, tokenizer):
    def spoil(value):
        for name, tensor in layers(value).items():
            layers(value)[name] = tensor.to(dtype)
        layers(value)["layers.1.mlp.dense_h_to_4h.weight"][3, 5] = number

    change(source / SHARD.format(0), spoil)
    message = refused(source, tmp_path, tokenizer)
    assert "layers.1.mlp_in.weight holds NaN or infinity" in message


def test_ranks_that_differ_where_they_must_not(source, tmp_path, tokenizer):
    change(source / SHARD.format(1), lambda v: layers(v)["layers.2.input_layernorm.bias"].add_(1))
    message = refused(source, tmp_path, tokenizer)
    assert "layers.2.attention_norm.bias differs from the same tensor" in message


def test_a_target_that_exists(source, tmp_path, tokenizer):
    (tmp_path / "converted").mkdir()
    (tmp_path / "converted" / "notes.txt").write_text("mine")
    assert "exists and is not empty" in refused(source, tmp_path, tokenizer)


def test_a_target_that_is_converted_already(source, tmp_path, tokenizer):
    convert(Conversion(source, tmp_path / "converted", tokenizer), lambda *_: None)
    assert "is converted already" in refused(source, tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_experts", 8, "mixtures of experts"),
        ("apply_residual_connection_post_layernorm", True, "residuals after the norm"),
        ("squared_relu", True, "squared ReLU"),
        ("position_embedding_type", "alibi", "'alibi'"),
        ("swiglu", True, "gated feed-forward block with learned positions"),
    ],
)
def test_models_that_nobody_serves(name, value, reason, source, tmp_path, tokenizer):
    assert reason in refused(source, tmp_path, tokenizer, arguments={name: value})


class Mark:
    """Makes a folder when it is unpickled by a reader that executes code."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("old_format", [False, True])
def test_a_pickle_with_code_is_never_executed(old_format, tmp_path, tokenizer):
    mark = tmp_path / "executed"
    file = tmp_path / "model_optim_rng.pt"
    value = {"model": {"language_model": {}}, "args": Mark(mark), "checkpoint_version": 3.0}
    torch.save(value, file, _use_new_zipfile_serialization=not old_format)
    assert open_torch_file(file).value["args"].name == "mkdir"
    assert "checkpoint" in refused(file, tmp_path, tokenizer)
    assert not mark.exists()
    torch.load(file, weights_only=False)
    assert mark.exists(), "the pickle does not do what the test believes"


def test_an_attribute_of_what_is_named_cannot_be_changed_for_others(tmp_path):
    """BUILD with a state sets attributes: on a function of ours that would stay."""
    named = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n"
    evil = named + b"}X\x01\x00\x00\x00aK\x01sb."
    file = tmp_path / "evil.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", evil)
    changed = open_torch_file(file).value
    assert changed.a == 1
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", named + b".")
    fresh = open_torch_file(file).value
    assert not hasattr(fresh, "a")


def test_a_pickle_that_names_a_huge_index_takes_no_memory(tmp_path):
    data = b"\x80\x02}r\xff\xff\xff\x7f."
    file = tmp_path / "huge.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)
    assert open_torch_file(file).value == {}


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_an_error_and_nothing_else(seed, source):
    file = source / SHARD.format(0)
    data = bytearray(file.read_bytes())
    pickled = zipfile.ZipFile(file).getinfo("model_optim_rng/data.pkl")
    generator = random.Random(seed)
    for _ in range(3):
        data[pickled.header_offset + 60 + generator.randrange(pickled.file_size)] = (
            generator.randrange(256)
        )
    file.write_bytes(data)
    try:
        said = repr(type(open_torch_file(file).value))
    except CheckpointError as error:
        said = str(error)
    assert said


def test_not_a_file_of_torch(tmp_path, tokenizer):
    file = tmp_path / "model.pt"
    file.write_bytes(b"hello")
    assert "not a file of torch.save" in refused(file, tmp_path, tokenizer)
    file.write_bytes(pickle.dumps({"model": 1}))
    assert "a pickle that torch.save did not write" in refused(file, tmp_path, tokenizer)


KILLED = """
import os, signal, sys
from pathlib import Path
from nightjar.checkpoints.convert import Conversion, convert, writing
writing.FILE_BYTES = 60_000
def progress(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
convert(Conversion(*map(Path, sys.argv[1:4])), progress)
"""


def test_a_killed_conversion_continues(source, tmp_path, tokenizer, monkeypatch):
    target = tmp_path / "converted"
    command = [sys.executable, "-c", KILLED, str(source), str(target), str(tokenizer)]
    killed = subprocess.run(command, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    written = {path: path.stat().st_mtime_ns for path in target.glob("*.safetensors")}
    assert len(written) >= 2
    monkeypatch.setattr(writing, "FILE_BYTES", 60_000)
    assert "dtype changed" in refused(source, tmp_path, tokenizer, dtype="bf16")
    convert(Conversion(source, target, tokenizer), lambda *_: None)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    whole = tmp_path / "whole"
    convert(Conversion(source, whole, tokenizer), lambda *_: None)
    names = {path.name for path in whole.iterdir()}
    assert {path.name for path in target.iterdir()} == names
    for name in names - {"conversion.json"}:
        assert (target / name).read_bytes() == (whole / name).read_bytes(), name
