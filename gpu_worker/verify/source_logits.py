"""The source framework's logits, from a file, beside those of the model."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nightjar.checkpoints import ModelConfig
from nightjar.gpu_worker.models import Decoder
from nightjar.gpu_worker.verify.plain_forward import plain_forward

MAX_FILE_BYTES = 8 << 30
MOST_DIFFERENCE = 0.1
"""Relative to the spread of the logits; bf16 through many layers stays below half of it."""
NOTABLE_DIFFERENCE = 0.02
"""More than the rounding of FP16 gives."""
_DIMENSIONS = {"token_ids": 2, "logits": 3, "hidden_states": 4}


@dataclass(frozen=True, slots=True)
class SourceLogits:
    """What another framework computed from texts.

    token_ids: each text's.  logits: for each text float32[tokens, V]; row t follows token t.
    hidden_states: for each text float32[layers + 1, tokens, H], or None; entry i is the input of
    layer i, the last one is the output of the last norm.
    """

    token_ids: tuple[list[int], ...]
    logits: tuple[Tensor, ...]
    hidden_states: tuple[Tensor, ...] | None


@dataclass(frozen=True, slots=True)
class LogitsComparison:
    """How far the model's logits are from the source's.

    difference: the largest root mean square of a position's differences, over the spread of the
    source's logits.  greedy: the share of positions with the same best token.
    text, position: where they first differ by more than MOST_DIFFERENCE; None where they do not.
    stage: what computes the first differing hidden states, where the file has them.
    """

    positions: int
    difference: float
    greedy: float
    text: int | None
    position: int | None
    stage: str | None


def read_source_logits(path: Path, config: ModelConfig) -> SourceLogits:
    """Read a .safetensors or .npz file; nothing in it is executed.

    Raises:
        ValueError: It cannot be read, lacks a tensor, or does not fit the model.
    """
    tensors = {name: _with_texts(name, found, path) for name, found in _read(path).items()}
    ids, logits = tensors["token_ids"], tensors["logits"]
    _check_shapes(path, ids, logits, config)
    lengths = [int((row >= 0).sum()) for row in ids]
    for row, length in zip(ids, lengths, strict=True):
        if not length or bool((row[:length] < 0).any()) or int(row.max()) >= config.vocab_size:
            raise ValueError(
                f"{path}: token_ids: each text has ids from 0 to {config.vocab_size - 1}, and -1 "
                "after its end"
            )
    hidden = tensors.get("hidden_states")
    if hidden is not None:
        wanted = [config.n_layers + 1, *ids.shape, config.hidden_size]
        if list(hidden.shape) != wanted:
            raise ValueError(f"{path}: hidden_states is {list(hidden.shape)}; expected {wanted}")
    return SourceLogits(
        token_ids=tuple(row[:n].tolist() for row, n in zip(ids, lengths, strict=True)),
        logits=tuple(logits[i, :n, : config.vocab_size].float() for i, n in enumerate(lengths)),
        hidden_states=None
        if hidden is None
        else tuple(hidden[:, i, :n].float() for i, n in enumerate(lengths)),
    )


def compare_logits(decoder: Decoder, source: SourceLogits) -> LogitsComparison:
    """Compute the texts with a whole decoder on the CPU, and compare."""
    worst, same, positions = 0.0, 0, 0
    begin: tuple[int, int] | None = None
    stage: str | None = None
    for text, (ids, theirs) in enumerate(zip(source.token_ids, source.logits, strict=True)):
        ours = plain_forward(decoder, ids)
        differences = _differences(ours.logits, theirs)
        positions += len(ids)
        same += int((ours.logits.argmax(1) == theirs.argmax(1)).sum())
        worst = max(worst, float(differences.max()))
        beyond = (differences > MOST_DIFFERENCE).nonzero()
        if begin is None and beyond.numel():
            begin = text, int(beyond[0])
            if source.hidden_states is not None:
                stage = _stage(ours.hidden_states, source.hidden_states[text])
    return LogitsComparison(
        positions=positions,
        difference=worst,
        greedy=same / positions,
        text=None if begin is None else begin[0],
        position=None if begin is None else begin[1],
        stage=stage,
    )


def _read(path: Path) -> dict[str, Tensor]:
    """Return the known tensors of a file, which has token_ids and logits."""
    if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: larger than {MAX_FILE_BYTES >> 30} GiB; give fewer texts")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                found = {
                    name: torch.from_numpy(np.ascontiguousarray(file[name]))
                    for name in file.files
                    if name in _DIMENSIONS
                }
        else:
            found = load_file(path)
    except (SafetensorError, zipfile.BadZipFile, TypeError, ValueError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as logits: {error}") from error
    missing = {"token_ids", "logits"} - found.keys()
    if missing:
        raise ValueError(f"{path}: no tensor {min(missing)!r}; it needs token_ids and logits")
    return {name: tensor for name, tensor in found.items() if name in _DIMENSIONS}


def _with_texts(name: str, tensor: Tensor, path: Path) -> Tensor:
    """Return a tensor with a dimension of texts; a file of one text may leave it out."""
    dimensions = _DIMENSIONS[name]
    if name == "token_ids" and tensor.is_floating_point():
        raise ValueError(f"{path}: token_ids must be integers, not {tensor.dtype}")
    if tensor.dim() == dimensions - 1:
        return tensor.unsqueeze(1 if name == "hidden_states" else 0)
    if tensor.dim() != dimensions:
        raise ValueError(
            f"{path}: {name} is {list(tensor.shape)}; expected {dimensions} dimensions"
        )
    return tensor


def _check_shapes(path: Path, ids: Tensor, logits: Tensor, config: ModelConfig) -> None:
    if not ids.numel() or logits.shape[:2] != ids.shape:
        raise ValueError(
            f"{path}: logits is {list(logits.shape)}, token_ids {list(ids.shape)}; expected "
            "[texts, tokens, vocabulary] and [texts, tokens]"
        )
    if logits.shape[2] < config.vocab_size:
        raise ValueError(
            f"{path}: logits of {logits.shape[2]} tokens; the model has {config.vocab_size}"
        )
    if ids.shape[1] > config.context_length:
        raise ValueError(
            f"{path}: texts of {ids.shape[1]} tokens; the model takes {config.context_length}"
        )


def _differences(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return each row's root mean square difference over the spread of theirs; NaN counts as inf.

    Adding a number to all logits of a row changes no probability, and counts as no difference.
    """
    ours, theirs = (rows - rows.mean(-1, keepdim=True) for rows in (ours, theirs))
    spread = theirs.square().mean(-1).sqrt().clamp_min(1e-30)
    found = (ours - theirs).square().mean(-1).sqrt() / spread
    return found.nan_to_num(nan=torch.inf)


def _stage(ours: Tensor, theirs: Tensor) -> str:
    """Name what computes the first hidden states that differ."""
    last = ours.shape[0] - 1
    for number in range(last + 1):
        if float(_differences(ours[number], theirs[number]).max()) > MOST_DIFFERENCE:
            if number == 0:
                return "the embeddings"
            norm = " or the last norm" if number == last else ""
            return f"layer {number - 1}{norm}"
    return "the language model head"
