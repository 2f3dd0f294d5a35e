"""A Hugging Face model directory, checked before anything is computed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from nightjar.checkpoints.config import ModelConfig
from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.json_file import read_json_object
from nightjar.checkpoints.safetensors_header import SafetensorsHeader
from nightjar.checkpoints.tokenizer import Tokenizer

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SAMPLES = 64
SAMPLE_BYTES = 64 * 1024
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A directory whose config.json, tokenizer.json and weight files fit together.

    headers: the weight files' headers, in the order of their names.
    fingerprint: sha256 over config.json, tokenizer.json and each weight file's name, size, header
    and samples of its weights: training a model on changes every one of them, and reading all of
    a large model would take minutes.
    """

    path: Path
    config: ModelConfig
    headers: tuple[SafetensorsHeader, ...]
    fingerprint: str

    @staticmethod
    def open(path: str | Path) -> ModelDirectory:
        """Check the directory; CheckpointError says what is wrong and how to mend it."""
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory; give a model directory")
        config = ModelConfig.read(directory)
        if not (directory / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{directory}: no tokenizer.json; save the model's tokenizer into the directory "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        headers = tuple(SafetensorsHeader.read(file) for file in _weight_files(directory))
        return ModelDirectory(directory, config, headers, _fingerprint(directory, headers))

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.resolve().name

    def weight_files(self) -> list[Path]:
        """The safetensors files that hold the weights."""
        return [header.path for header in self.headers]

    def tokenizer(self) -> Tokenizer:
        """The directory's tokenizer, checked against the vocabulary of the weights."""
        return Tokenizer.read(self.path / "tokenizer.json", self.config.vocab_size)


def _weight_files(directory: Path) -> list[Path]:
    """The files of the index, or the single file; pickles are refused by name."""
    index = directory / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    if (directory / SINGLE_NAME).is_file():
        return [directory / SINGLE_NAME]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{directory}: {names}, but no {INDEX_NAME}; restore the index")
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{directory}: {', '.join(pickles)}: pickles can run any code and are never opened; "
            "convert the weights to safetensors (save_pretrained(..., safe_serialization=True))"
        )
    raise CheckpointError(f"{directory}: no *.safetensors file; copy the weights into it")


def _indexed_files(index: Path) -> list[Path]:
    """The shards an index names; each must lie beside it."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map; restore the file")
    files = []
    for name in sorted({str(value) for value in weight_map.values()}):
        file = index.parent / name
        if Path(name).name != name or file.suffix != ".safetensors":
            raise CheckpointError(f"{index}: {name!r} is not a safetensors file beside the index")
        if not file.is_file():
            raise CheckpointError(f"{index}: {name} is missing; copy it beside the index")
        files.append(file)
    return files


def _fingerprint(directory: Path, headers: tuple[SafetensorsHeader, ...]) -> str:
    """sha256, in hexadecimal."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        content = (directory / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    for header in headers:
        digest.update(f"{header.path.name}\0{header.size_bytes}\0".encode() + header.raw)
        digest.update(_samples(header))
    return digest.hexdigest()


def _samples(header: SafetensorsHeader) -> bytes:
    """Bytes from evenly spread places of a weight file; all of a small one."""
    steps = max(1, header.size_bytes // (SAMPLES * SAMPLE_BYTES))
    with header.path.open("rb") as file:
        taken = []
        for start in range(0, header.size_bytes, steps * SAMPLE_BYTES):
            file.seek(start)
            taken.append(file.read(SAMPLE_BYTES))
    return b"".join(taken)
