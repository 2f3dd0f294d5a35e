"""The precision plan of a model: what FP16 or int8 cannot hold, and so stays in FP32.

It is a file beside the weights, `nightjar-plan.json`. `nightjar verify --write-plan` makes it. Its
content is part of the model's fingerprint, because answers depend on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.json_file import read_json_object

PLAN_NAME = "nightjar-plan.json"
FORMAT = 1
MOST_SHIFT = 24


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What stays in FP32 in one layer.

    attention_input, mlp_input: the normalised rows before the first product of a half block.
    up: the result of the feed-forward block's first product, after its activation.
    query, key, value: powers of two that these heads are divided by.  The cache holds them so.
    """

    attention_input: bool = False
    mlp_input: bool = False
    up: bool = False
    query: int = 0
    key: int = 0
    value: int = 0


PLAIN = LayerPlan()


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """What of a model stays in FP32, by precision.

    model: fingerprint of the model's other files.  fp16: by layer; layers without an entry need
    nothing.  int8: the layers whose feed-forward block is computed in FP32.
    """

    model: str
    fp16: Mapping[int, LayerPlan] = field(default_factory=dict)
    int8: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """A name that changes with any part of the plan."""
        text = json.dumps(self.as_json(), sort_keys=True)
        return f"plan-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def concerns(self, dtype: str) -> bool:
        """Whether a model in this precision is computed otherwise than without a plan."""
        return bool(self.fp16 if dtype == "fp16" else self.int8 if dtype == "int8" else ())

    def precision(self, dtype: str) -> str:
        """Return how results name a precision, with the plan where it concerns it."""
        return f"{dtype}+{self.name}" if self.concerns(dtype) else dtype

    def layer(self, number: int, dtype: str) -> LayerPlan:
        """Return what stays in FP32 in one layer."""
        return self.fp16.get(number, PLAIN) if dtype == "fp16" else PLAIN

    def is_exact(self, number: int, dtype: str) -> bool:
        """Whether the feed-forward block of a layer is computed in FP32."""
        return dtype == "int8" and number in self.int8

    def divides_heads(self, dtype: str) -> bool:
        """Whether queries, keys or values are divided in this precision."""
        divided = any(layer.query or layer.key or layer.value for layer in self.fp16.values())
        return dtype == "fp16" and divided

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        layers = {
            str(number): {name: value for name, value in asdict(layer).items() if value}
            for number, layer in sorted(self.fp16.items())
        }
        return {"format": FORMAT, "model": self.model, "fp16": layers, "int8": list(self.int8)}

    def write(self, directory: Path, *, overwrite: bool = False) -> Path:
        """Write the plan into a model directory; return its path.

        Raises:
            CheckpointError: Another plan is there, or the file cannot be written.
        """
        path = directory / PLAN_NAME
        text = json.dumps(self.as_json(), indent=2) + "\n"
        try:
            if path.exists() and not overwrite and path.read_text(encoding="utf-8") != text:
                raise CheckpointError(
                    f"{path}: another plan is there; give --overwrite, or move it"
                )
            with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
                file.write(text)
            Path(file.name).chmod(0o644)
            os.replace(file.name, path)  # noqa: PTH105 - atomic
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
        return path


def read_plan(directory: Path, n_layers: int) -> PrecisionPlan | None:
    """Return the plan in a model directory; None without one.

    Raises:
        CheckpointError: It is not a plan for so many layers; the message names the field.
    """
    path = directory / PLAN_NAME
    if not path.is_file():
        return None
    found = read_json_object(path)
    if found.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format is {found.get('format')!r}; this version reads 1")
    layers, exact = found.get("fp16"), found.get("int8")
    if not isinstance(found.get("model"), str) or not isinstance(layers, dict):
        raise CheckpointError(f"{path}: model must be a text, and fp16 an object of layers")
    if not isinstance(exact, list) or not all(_is_layer(number, n_layers) for number in exact):
        raise CheckpointError(f"{path}: int8 must be a list of layers below {n_layers}")
    return PrecisionPlan(
        model=found["model"],
        fp16={int(n): _layer_plan(path, n, layer, n_layers) for n, layer in layers.items()},
        int8=tuple(exact),
    )


def _layer_plan(path: Path, number: str, layer: object, n_layers: int) -> LayerPlan:
    where = f"{path}: fp16.{number}"
    if not number.isdecimal() or int(number) >= n_layers or not isinstance(layer, dict):
        raise CheckpointError(f"{where}: expected an object for a layer below {n_layers}")
    kinds = {name: type(value) for name, value in asdict(PLAIN).items()}
    for name, value in layer.items():
        wanted = kinds.get(name)
        if wanted is None:
            raise CheckpointError(f"{where}.{name}: unknown; expected {', '.join(kinds)}")
        if type(value) is not wanted or (wanted is int and not 0 <= value <= MOST_SHIFT):
            kind = "true or false" if wanted is bool else f"a number from 0 to {MOST_SHIFT}"
            raise CheckpointError(f"{where}.{name} is {value!r}; expected {kind}")
    return LayerPlan(**layer)


def _is_layer(number: object, n_layers: int) -> bool:
    return type(number) is int and 0 <= number < n_layers
