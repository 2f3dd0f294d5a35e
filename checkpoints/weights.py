"""Which tensors a configuration asks for, compared with what the weight files hold.

Only headers are read, so a directory whose weights belong to another configuration is refused
before anything is queued or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nightjar.checkpoints.config import ModelConfig
from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.safetensors_header import SafetensorsHeader

Shape = tuple[int, ...]
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")

# Checkpoints of a bare decoder and of one with a head differ by this prefix.
OPTIONAL_PREFIX = "transformer."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: its file, its name there, how it is stored."""

    path: Path
    stored_name: str
    dtype: str
    shape: Shape


def find_tensors(headers: Iterable[SafetensorsHeader]) -> dict[str, StoredTensor]:
    """Every tensor of the files, by its name without the optional prefix."""
    return {
        stored.removeprefix(OPTIONAL_PREFIX): StoredTensor(header.path, stored, dtype, shape)
        for header in headers
        for stored, (dtype, shape) in header.tensors.items()
    }


def check_tensors(
    directory: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> None:
    """Every tensor the config asks for is there, in floating point, with its shape; else an
    error."""
    for name, expected in EXPECTED_TENSORS[config.family](config).items():
        if name not in tensors:
            raise CheckpointError(
                f"{directory}: the weights hold no tensor {name!r}, which config.json asks for; "
                "the two belong to different models or a shard is missing"
            )
        found = tensors[name]
        if found.shape != expected:
            raise CheckpointError(
                f"{found.path}: tensor {name!r} has shape {list(found.shape)}, but config.json "
                f"asks for {list(expected)}; use the config.json that was saved with these weights"
            )
        if found.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{found.path}: tensor {name!r} is stored as {found.dtype}; save it as one of "
                f"{', '.join(FLOAT_TYPES)}"
            )


def gpt2_tensors(config: ModelConfig) -> dict[str, Shape]:
    """GPT-2's names and shapes.  Projections are stored [in, out]; the causal masks that old
    checkpoints carry (h.*.attn.bias) are not weights and are not asked for."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {
        "wte.weight": (config.vocab_size, hidden),
        "wpe.weight": (config.context_length, hidden),
        "ln_f.weight": (hidden,),
        "ln_f.bias": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    projections = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    for layer in range(config.n_layers):
        for norm in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{norm}.weight"] = (hidden,)
            shapes[f"h.{layer}.{norm}.bias"] = (hidden,)
        for name, shape in projections.items():
            shapes[f"h.{layer}.{name}.weight"] = shape
            shapes[f"h.{layer}.{name}.bias"] = shape[1:]
    return shapes


EXPECTED_TENSORS: dict[str, Callable[[ModelConfig], dict[str, Shape]]] = {"gpt2": gpt2_tensors}
