"""A Hugging Face model directory, checked before anything is computed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nightjar.checkpoints.chat_template import ChatTemplate
from nightjar.checkpoints.config import ModelConfig
from nightjar.checkpoints.digest_cache import FileStamp
from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.families import read_config
from nightjar.checkpoints.fingerprint import SMALL_NAMES, fingerprint, stamps
from nightjar.checkpoints.json_file import read_json_object
from nightjar.checkpoints.precision_plan import PLAN_NAME, PrecisionPlan, read_plan
from nightjar.checkpoints.safetensors_header import SafetensorsHeader
from nightjar.checkpoints.tokenizer import Tokenizer
from nightjar.checkpoints.weights import StoredTensor, check_tensors, find_tensors

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class ModelDirectory:
    """A directory whose config.json, tokenizer.json and weight files fit together.

    headers: the weight files' headers, in the order of their names.
    tensors: what they hold, by the names that the decoder asks for.
    stamp: changes with the content of any file that answers depend on; taken before reading them.
    """

    path: Path
    config: ModelConfig
    headers: tuple[SafetensorsHeader, ...]
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    stamp: str = field(repr=False)
    _tokenizer: Tokenizer = field(repr=False, compare=False)

    @staticmethod
    def open(path: str | Path) -> ModelDirectory:
        """Check the directory; CheckpointError says what is wrong and how to correct it."""
        directory = Path(path)
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory; give a model directory")
        small = [directory / name for name in SMALL_NAMES]
        before = stamps(small)
        config = read_config(directory)
        if not (directory / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{directory}: no tokenizer.json; save the model's tokenizer into the directory "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        weight_files = _weight_files(directory)
        stamp = _stamp([*small, *weight_files], [*before, *stamps(weight_files)])
        headers = tuple(SafetensorsHeader.read(file) for file in weight_files)
        tensors = find_tensors(config, headers)
        check_tensors(directory, config, tensors)
        tokenizer = Tokenizer.read(directory / "tokenizer.json", config.vocab_size)
        return ModelDirectory(directory, config, headers, tensors, stamp, tokenizer)

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.resolve().name

    @cached_property
    def fingerprint(self) -> str:
        """The model's fingerprint; the first access reads all files.

        Raises:
            CheckpointError: A file cannot be read, or has changed since the directory was opened.
        """
        found = fingerprint(self.path, [header.path for header in self.headers])
        self.check_unchanged(self.stamp)
        return found

    @cached_property
    def plain_fingerprint(self) -> str:
        """The fingerprint of all files but the precision plan; raises as `fingerprint` does."""
        if not (self.path / PLAN_NAME).is_file():
            return self.fingerprint
        names = [name for name in SMALL_NAMES if name != PLAN_NAME]
        return fingerprint(self.path, [header.path for header in self.headers], names)

    def plan(self) -> PrecisionPlan | None:
        """Return the model's precision plan; None without one.

        Raises:
            CheckpointError: The file is no plan, or was made for other files.
        """
        found = read_plan(self.path, self.config.n_layers)
        if found is not None and found.model != self.plain_fingerprint:
            raise CheckpointError(
                f"{self.path / PLAN_NAME}: made for other files than these; make it again with "
                "`nightjar verify --write-plan --overwrite`, or move it away"
            )
        return found

    def check_unchanged(self, stamp: str) -> None:
        """Raise CheckpointError if the files have changed since this stamp."""
        files = [self.path / name for name in SMALL_NAMES]
        files += [header.path for header in self.headers]
        if _stamp(files, stamps(files)) != stamp:
            raise CheckpointError(
                f"{self.path}: the files have changed since they were opened; start again, and "
                "serve another version of a model from another directory"
            )

    def tokenizer(self) -> Tokenizer:
        """The directory's tokenizer, which fits the vocabulary of the weights."""
        return self._tokenizer

    def chat_template(self) -> ChatTemplate | None:
        """Return the chat template, or None; CheckpointError if the template is broken."""
        return ChatTemplate.read(self.path)


def _stamp(files: Sequence[Path], stamps: Sequence[FileStamp | None]) -> str:
    parts = [f"{file.name} {stamp}" for file, stamp in zip(files, stamps, strict=True)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _weight_files(directory: Path) -> list[Path]:
    """Return the files of the index, or the single file; pickles are refused by name."""
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
