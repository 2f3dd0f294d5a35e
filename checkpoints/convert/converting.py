"""`nightjar convert`: from a training framework's checkpoint to a directory that is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nightjar.checkpoints.convert.faster_transformer import CONFIG, open_faster_transformer
from nightjar.checkpoints.convert.megatron import open_megatron
from nightjar.checkpoints.convert.recipes import RecipeBook
from nightjar.checkpoints.convert.shape import config_json
from nightjar.checkpoints.convert.source import Source
from nightjar.checkpoints.convert.vocabulary import Vocabulary, as_json, read_vocabulary
from nightjar.checkpoints.convert.writing import Progress, Writer, plan_files
from nightjar.checkpoints.digest_cache import FileStamp
from nightjar.checkpoints.directory import ModelDirectory
from nightjar.checkpoints.errors import CheckpointError

DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be converted.

    source: a Megatron-LM checkpoint or a FasterTransformer folder.  target: a new folder.
    tokenizer: see `read_vocabulary`.  end: the token that ends a text.
    dtype: "fp32", "fp16" or "bf16" of all weights; None keeps each one's own.
    arguments: of the training, in the place of the checkpoint's.
    version: of the checkpoint's row order, in the place of its own.
    """

    source: Path
    target: Path
    tokenizer: Path
    end: str | None = None
    dtype: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    version: float | None = None


@dataclass(frozen=True, slots=True)
class Converted:
    """What was converted: for people, and for `--json`."""

    description: str
    family: str
    target: Path
    vocab_size: int
    padding_rows: int
    size_bytes: int
    files: int
    end_ids: tuple[int, ...]


def convert(job: Conversion, progress: Progress) -> Converted:
    """Convert a checkpoint; a conversion that was interrupted continues.

    Tensors of 128 MiB together, or one larger one, and blocks of their sources are in memory.

    progress: called with the bytes that are written and the bytes of all tensors.

    Raises:
        CheckpointError: The checkpoint is damaged, not whole or not supported, the tokenizer does
            not belong to it, or the target cannot be written.
    """
    source = _open(job)
    vocabulary = read_vocabulary(job.tokenizer, job.end)
    _check_vocabulary(job, source, vocabulary)
    dtype = None if job.dtype is None else DTYPES[job.dtype]
    recipes = RecipeBook(source, vocabulary.size, dtype).recipes()
    files = plan_files(recipes)
    total = sum(file.size_bytes for file in files)
    writer = Writer(job.target, _description(job, source))
    config = _config(source, vocabulary, recipes[0].dtype)
    writer.write_small("config.json", as_json(config))
    for name, data in vocabulary.files.items():
        writer.write_small(name, data)
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    for file in files:
        writer.write_file(file, wrote)
    writer.finish(files)
    ModelDirectory.open(job.target)
    return Converted(
        description=source.description,
        family=str(config["model_type"]),
        target=job.target,
        vocab_size=vocabulary.size,
        padding_rows=source.shape.vocab_rows - vocabulary.size,
        size_bytes=total,
        files=len(files),
        end_ids=vocabulary.end_ids,
    )


def _open(job: Conversion) -> Source:
    if not job.source.exists():
        raise CheckpointError(f"{job.source}: no such file or folder")
    if (job.source / CONFIG).is_file():
        return open_faster_transformer(job.source)
    if (job.source / "config.json").is_file():
        raise CheckpointError(
            f"{job.source}: a Hugging Face directory already; it is served as it is"
        )
    return open_megatron(job.source, job.arguments, job.version)


def _check_vocabulary(job: Conversion, source: Source, vocabulary: Vocabulary) -> None:
    """Refuse a tokenizer whose padded size is not that of the embedding table."""
    rows, size = source.shape.vocab_rows, vocabulary.size
    if size > rows:
        raise CheckpointError(
            f"{job.tokenizer}: {size} tokens, but the model's embedding table has {rows} rows; "
            "give the tokenizer that it was trained with"
        )
    multiple = source.vocab_multiple
    if multiple is not None and -(-size // multiple) * multiple != rows:
        raise CheckpointError(
            f"{job.tokenizer}: {size} tokens, which the training would have padded to "
            f"{-(-size // multiple) * multiple} rows, but the table has {rows}; give the tokenizer "
            "that the model was trained with, or --argument make_vocab_size_divisible_by=1 "
            "if the table was padded in another way"
        )


def _config(source: Source, vocabulary: Vocabulary, dtype: str) -> dict[str, Any]:
    config = config_json(source.shape, vocabulary.size, _TORCH_NAMES[dtype])
    ends = vocabulary.end_ids
    config["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends) or None
    return config


def _description(job: Conversion, source: Source) -> dict[str, Any]:
    """Return what decides the content; a folder that holds another conversion is refused by it."""
    stamps = {}
    for path in source.files:
        stamp = FileStamp.of(path)
        stamps[str(path)] = None if stamp is None else [stamp.size_bytes, stamp.modified_ns]
    return {
        "source": source.description,
        "source files": stamps,
        "tokenizer": str(job.tokenizer),
        "dtype": job.dtype,
        "arguments": dict(job.arguments),
        "version": job.version,
    }
