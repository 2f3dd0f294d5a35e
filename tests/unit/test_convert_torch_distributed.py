"""Megatron-Core's distributed checkpoints become the model that they were written from."""

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from nightjar.checkpoints import CheckpointError
from nightjar.checkpoints.convert import Conversion, convert
from tests.megatron_models import VOCABULARY, gpt2, llama, save_whole_tokenizer
from tests.megatron_writer import Layout, write_checkpoint

COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
ROWS = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
TABLES = ("word_embeddings.weight", "output_layer.weight")


@pytest.fixture(scope="module", name="tokenizer")
def whole_tokenizer(tmp_path_factory):
    return save_whole_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def chunks_of(name, tensor, ranks, gated):
    """The tensor's chunks with their offsets, as the ranks write them."""
    if name.endswith(COLUMNS):
        parts = tensor.chunk(ranks, dim=1)
        return [((0, i * parts[0].shape[1]), part) for i, part in enumerate(parts)]
    if name.endswith((*ROWS, *TABLES)):
        count = 2 * ranks if gated and "linear_fc1" in name else ranks
        parts = tensor.chunk(count)
        rest = (0,) * (tensor.ndim - 1)
        return [((i * parts[0].shape[0], *rest), part) for i, part in enumerate(parts)]
    return [((0,) * tensor.ndim, tensor)]


def save(model, folder, tmp_path, *, ranks, stacked=False, gated=False):
    """Write by PyTorch's own records what `torch.distributed.checkpoint` would save."""
    plain = write_checkpoint(model, tmp_path / "plain", Layout(core=True, padded_to=16))
    value = torch.load(plain / "iter_0000100/mp_rank_00/model_optim_rng.pt", weights_only=False)
    iteration = folder / "iter_0000100"
    iteration.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    value["args"].tensor_model_parallel_size = ranks
    value["args"].make_vocab_size_divisible_by = 16 // ranks
    torch.save(
        {key: value[key] for key in ("args", "iteration", "checkpoint_version")},
        iteration / "common.pt",
    )
    about, places, files = {}, {}, [io.BytesIO() for _ in range(ranks)]
    for name, tensor in value["model"].items():
        if not torch.is_tensor(tensor):
            continue
        layer, key, shape = None, name, tensor.shape
        if stacked and ".layers." in name:
            _, number, rest = name.split("layers.")[0], *name.split("layers.")[1].split(".", 1)
            layer, key = int(number), f"decoder.layers.{rest}"
            shape = (model.config.num_hidden_layers, *tensor.shape)
        record = about.setdefault(
            key, TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(shape), [])
        )
        for i, (offset, part) in enumerate(chunks_of(name, tensor, ranks, gated)):
            chunk = part.clone() if layer is None else part[None].clone()
            at = torch.Size(offset if layer is None else (layer, *offset))
            record.chunks.append(ChunkStorageMetadata(at, chunk.shape))
            begin = files[i % ranks].tell()
            torch.save(chunk, files[i % ranks])
            length = files[i % ranks].tell() - begin
            index = MetadataIndex(key, at)
            places[index] = _StorageInfo(f"__{i % ranks}_0.distcp", begin, length)
    for number, file in enumerate(files):
        (iteration / f"__{number}_0.distcp").write_bytes(file.getvalue())
    (iteration / ".metadata").write_bytes(pickle.dumps(Metadata(about, None, places)))
    return folder


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("make", "cls", "gated"), [(gpt2, GPT2LMHeadModel, False), (llama, LlamaForCausalLM, True)]
)
def test_the_logits_are_those_of_the_model(make, cls, gated, ranks, stacked, tmp_path, tokenizer):
    model = make()
    source = save(model, tmp_path / "source", tmp_path, ranks=ranks, stacked=stacked, gated=gated)
    found = convert(Conversion(source, tmp_path / "converted", tokenizer), lambda *_: None)
    assert "torch_dist" in found.description
    tokens = torch.arange(20)[None] * 17 % VOCABULARY
    with torch.no_grad():
        logits = cls.from_pretrained(tmp_path / "converted").eval()(tokens).logits
        assert torch.equal(logits, model(tokens).logits)


def test_a_missing_chunk_is_named(tmp_path, tokenizer):
    source = save(gpt2(), tmp_path / "source", tmp_path, ranks=2)
    path = source / "iter_0000100/.metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - written above
    lost = MetadataIndex("decoder.layers.1.mlp.linear_fc2.weight", torch.Size((0, 64)))
    del metadata.storage_data[lost]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp_out"):
        convert(Conversion(source, tmp_path / "converted", tokenizer), lambda *_: None)


def test_a_path_outside_the_folder_is_refused(tmp_path, tokenizer):
    source = save(gpt2(), tmp_path / "source", tmp_path, ranks=1)
    path = source / "iter_0000100/.metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - written above
    for place in metadata.storage_data.values():
        place.relative_path = "../../plain/secret"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="names no place"):
        convert(Conversion(source, tmp_path / "converted", tokenizer), lambda *_: None)


def test_zarr_is_refused_with_what_to_do(tmp_path, tokenizer):
    (tmp_path / "source/embedding").mkdir(parents=True)
    (tmp_path / "source/embedding/.zarray").write_text("{}")
    with pytest.raises(CheckpointError, match="--ckpt-format torch"):
        convert(Conversion(tmp_path / "source", tmp_path / "converted", tokenizer), lambda *_: None)
