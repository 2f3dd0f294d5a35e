"""Reads LoRA adapters (arXiv 2106.09685) that PEFT saved, and checks them against a model.

Only safetensors files are read. The factors get names that do not depend on the model's family:
`LAYER.PROJECTION.down` [rank, inputs] and `LAYER.PROJECTION.up` [outputs, rank], both FP32. The
adapter's scale is part of `up`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

from nightjar.checkpoints.config import ModelConfig
from nightjar.checkpoints.directory import ModelDirectory
from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.json_file import read_json_object
from nightjar.checkpoints.precision_plan import PrecisionPlan
from nightjar.checkpoints.safetensors_header import SafetensorsHeader
from nightjar.checkpoints.weights import TENSOR_NAMES

Factors = dict[str, np.ndarray[tuple[int, int], np.dtype[np.float32]]]

MOST_RANK = 512
MOST_BYTES = 256 << 20
"""The limit of an adapter's file, and of its factors in FP32."""

_CONFIG, _WEIGHTS, _PICKLE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
# Settings that change what an adapter computes, and are not served: name -> what it is.
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases of the factors",
    "modules_to_save": "whole modules beside the factors",
    "layer_replication": "replicated layers",
    "megatron_config": "Megatron's parallel layers",
    "alora_invocation_tokens": "activated LoRA",
    "trainable_token_indices": "trained token embeddings",
    "target_parameters": "adapted parameters that are no linear layers",
    "arrow_config": "Arrow's routing",
    "kasa_config": "KaSA, which changes the base model,",
    "monteclora_config": "MonteCLoRA",
}
# Ways to begin the training that change the base model's weights.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<factor>A|B)\.weight")
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def not_served(model: ModelDirectory, dtype: str, ranks: int) -> str | None:
    """Return why a model takes no adapter where it is served so; None where it takes them.

    ranks: processes that compute the model together.

    Raises:
        CheckpointError: The model's precision plan matters and cannot be read.
    """
    return not_computed(model.plan() if dtype == "fp16" else None, dtype, ranks)


def not_computed(plan: PrecisionPlan | None, dtype: str, ranks: int) -> str | None:
    """Return `not_served` of a model with this precision plan."""
    if ranks > 1:
        return "the model is split over several processes; serve it without shards"
    if plan is not None and plan.divides_heads(dtype):  # the factors do not reach an adapter
        return f"the precision plan divides heads in {dtype}; serve the model in bf16 or fp32"
    return None


def read_adapter(folder: Path, config: ModelConfig) -> Factors:
    """Read the LoRA adapter in a directory of PEFT, for a model of this configuration.

    Raises:
        CheckpointError: It cannot be read, is no LoRA adapter, uses what is not served, or does not
            fit the model.
    """
    settings = read_json_object(folder / _CONFIG)
    _check_settings(folder / _CONFIG, settings)
    path = folder / _WEIGHTS
    if not path.is_file() and (folder / _PICKLE).exists():
        raise CheckpointError(
            f"{folder} holds {_PICKLE}, a pickle, which is never read; save the adapter with "
            "safe_serialization=True"
        )
    modules = _modules(path, config)
    shapes = adapted_shapes(config)
    names, projections = TENSOR_NAMES[config.family], _projections(config)
    factors: Factors = {}
    for (layer, name), pair in sorted(modules.items()):
        projection = projections[name]
        label = f"{path}: layer {layer}, {name}"
        down, up = _checked(label, pair, shapes[projection])
        module = f"{names.prefix}{names.layer}.{layer}.{name}"
        up = up * np.float32(_scale(label, settings, module, down.shape[0]))
        if names.interleaved and projection == "query_key_value":
            up = up.reshape(config.n_heads, 3, config.head_size, -1).swapaxes(0, 1)
            up = up.reshape(-1, down.shape[0])
        factors[f"{layer}.{projection}.down"] = down
        factors[f"{layer}.{projection}.up"] = np.ascontiguousarray(up)
    return factors


def rank_of(factors: Mapping[str, Any]) -> int:
    """Return the largest rank among an adapter's factors."""
    return max(int(one.shape[0]) for name, one in factors.items() if name.endswith(".down"))


def adapted_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the projections of a layer that may be adapted: name -> (inputs, outputs)."""
    sizes = TENSOR_NAMES[config.family].projections(config)
    return {projection: sizes[name][:2] for name, projection in _projections(config).items()}


def unfit(factors: Mapping[str, Any], config: ModelConfig) -> str | None:
    """Return why factors of `read_adapter` do not fit a model, or None if they do.

    The factors are arrays or tensors.
    """
    shapes = adapted_shapes(config)
    for name, factor in factors.items():
        layer, _, rest = name.partition(".")
        projection, _, side = rest.partition(".")
        if not layer.isdigit() or int(layer) >= config.n_layers:
            return f"it adapts layer {layer}, but the model has {config.n_layers} layers"
        if projection not in shapes or side not in ("down", "up"):
            return f"it adapts {rest!r}, which the model does not have"
        other = factors.get(f"{layer}.{projection}.{'up' if side == 'down' else 'down'}")
        inputs, outputs = shapes[projection]
        rank = int(factor.shape[0 if side == "down" else 1]) if factor.ndim == 2 else 0
        wanted = (rank, inputs) if side == "down" else (outputs, rank)
        pair = other is not None and other.ndim == 2 and rank in other.shape
        if not 0 < rank <= MOST_RANK or tuple(factor.shape) != wanted or not pair:
            return f"{name} has the shape {list(factor.shape)}, but the model needs {list(wanted)}"
    return None if factors else "it adapts nothing"


def _projections(config: ModelConfig) -> dict[str, str]:
    """Return the family's names of a layer's projections -> what they are called here."""
    names = TENSOR_NAMES[config.family]
    attention: tuple[str, ...] = ("query", "key", "value")
    if len(names.query_key_value) == 1:
        attention = ("query_key_value",)
    return {
        **dict(zip(names.query_key_value, attention, strict=True)),
        names.attention_out: "attention_out",
        **dict(zip(names.mlp_in, ("gate", "up") if config.gated else ("up",), strict=True)),
        names.mlp_out: "down",
    }


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse, by name, what adapter_config.json asks for and is not served."""
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {settings.get('peft_type')!r}, not 'LORA'")
    rank = settings.get("r")
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise CheckpointError(f"{path}: r is {rank!r}; use a rank from 1 to {MOST_RANK}")
    if settings.get("bias", "none") != "none":
        raise CheckpointError(
            f"{path}: bias is {settings['bias']!r}, trained biases, which are not served; train "
            "with bias='none'"
        )
    for name, meaning in _REFUSED.items():
        if settings.get(name):
            raise CheckpointError(f"{path}: {name} is set: {meaning} cannot be served")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise CheckpointError(
            f"{path}: init_lora_weights is {start!r}, which changes the base model; save the "
            "adapter with path_initial_model_for_weight_conversion"
        )


def _modules(path: Path, config: ModelConfig) -> dict[tuple[int, str], dict[str, Any]]:
    """Read the file; return the factors A and B of each adapted projection."""
    header = SafetensorsHeader.read(path)
    if header.size_bytes > MOST_BYTES:
        raise CheckpointError(f"{path} is larger than {MOST_BYTES >> 20} MiB")
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for name in header.tensors:
        place = _place(path, name, config)
        found.setdefault(place[:2], {})[place[2]] = name
    if not found:
        raise CheckpointError(f"{path} adapts nothing: it holds no tensor")
    try:
        tensors = dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return {
        place: {factor: _array(path, name, tensors[name]) for factor, name in pair.items()}
        for place, pair in found.items()
    }


def _place(path: Path, name: str, config: ModelConfig) -> tuple[int, str, str]:
    """Return the layer, the projection by the family's name, and the factor of a tensor."""
    names = TENSOR_NAMES[config.family]
    matched = _NAME.fullmatch(name)
    if matched is None:
        meaning = "DoRA" if "magnitude" in name else "no factor A or B of a linear layer"
        raise CheckpointError(f"{path}: tensor {name[:120]!r} is {meaning}; it cannot be served")
    module = matched["module"].removeprefix("base_model.model.").removeprefix(names.prefix)
    kind, _, rest = module.partition(".")
    number, _, projection = rest.partition(".")
    if kind != names.layer or not (number.isascii() and number.isdigit()):
        raise CheckpointError(
            f"{path}: {module[:120]!r} is adapted; only linear layers of the model's blocks are "
            f"served: {', '.join(_projections(config))}"
        )
    if projection not in _projections(config):
        raise CheckpointError(
            f"{path}: {projection[:120]!r} is adapted, which this model does not have; it has "
            f"{', '.join(_projections(config))}"
        )
    if len(number) > 6 or int(number) >= config.n_layers:
        raise CheckpointError(
            f"{path}: layer {number[:20]} is adapted, but the model has {config.n_layers} layers; "
            "name the model that the adapter was trained for"
        )
    return int(number), projection, matched["factor"]


def _array(path: Path, name: str, tensor: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return a stored tensor in FP32."""
    kind, shape = tensor["dtype"], tuple(tensor["shape"])
    if kind == "BF16":
        wide = np.frombuffer(tensor["data"], np.uint16).astype(np.uint32) << 16
        found = wide.view(np.float32).reshape(shape)
    elif kind in _FLOATS:
        with np.errstate(over="ignore"):  # what does not fit becomes infinite, and is refused
            found = np.frombuffer(tensor["data"], _FLOATS[kind]).reshape(shape).astype(np.float32)
    else:
        raise CheckpointError(
            f"{path}: tensor {name!r} is stored as {kind}; save it as F32, F16 or BF16"
        )
    if not np.isfinite(found).all():
        raise CheckpointError(f"{path}: tensor {name!r} holds NaN or infinity; train it again")
    return found


def _checked(label: str, pair: Mapping[str, Any], shape: tuple[int, int]) -> tuple[Any, Any]:
    """Return the factors A and B of one projection of (inputs, outputs)."""
    missing = [one for one in "AB" if one not in pair]
    if missing:
        raise CheckpointError(f"{label}: lora_{missing[0]} is missing; save the adapter again")
    down, up = pair["A"], pair["B"]
    inputs, outputs = shape
    rank = down.shape[0] if down.ndim == 2 else 0
    if down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise CheckpointError(
            f"{label}: lora_A is {list(down.shape)} and lora_B {list(up.shape)}, but this model "
            f"needs [rank, {inputs}] and [{outputs}, rank]; name the model that the adapter was "
            "trained for"
        )
    if not 1 <= rank <= MOST_RANK:
        raise CheckpointError(f"{label}: the rank is {rank}; use a rank from 1 to {MOST_RANK}")
    return down, up


def _scale(label: str, settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the scale of one module's product, as PEFT computes it."""
    alpha = settings.get("lora_alpha", 8)
    patterns = settings.get("alpha_pattern") or {}
    for pattern, own in patterns.items() if isinstance(patterns, dict) else ():
        if not re.fullmatch(r"[\w.]+", pattern):
            raise CheckpointError(
                f"{label}: alpha_pattern names {pattern[:80]!r}; only names of modules are served"
            )
        if f".{module}".endswith(f".{pattern}"):
            alpha = own
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(f"{label}: lora_alpha is {alpha!r}; use a number")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
