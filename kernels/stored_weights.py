"""Packed weights as a plain description and a list of tensors, and back.

The description is JSON: a record is an object with the name of its class. So what is read back can
be mapped from a file, and nothing in that file is executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from nightjar.kernels.native.float_linear import FloatPanelWeight, PanelTable
from nightjar.kernels.native.int8_linear import Int8PanelWeight
from nightjar.kernels.operands import LayerWeights, Norm

_CLASSES = (FloatPanelWeight, Int8PanelWeight, PanelTable, LayerWeights, Norm)
KNOWN: Mapping[str, type] = {known.__name__: known for known in _CLASSES}
"""The records of a decoder on a CPU with compiled kernels."""


class NotStorableError(Exception):
    """A weight of a kind that only its own process can hold."""


def described(value: object, tensors: list[Tensor], classes: Mapping[str, type] = KNOWN) -> Any:  # noqa: ANN401 - JSON
    """Return a value's description; its tensors are appended, each once.

    Raises:
        NotStorableError: It holds a record of another class.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        for number, known in enumerate(tensors):
            if known is value:
                return {"tensor": number}
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, tuple):
        return [described(one, tensors, classes) for one in value]
    kind = type(value)
    if not is_dataclass(value) or classes.get(kind.__name__) is not kind:
        raise NotStorableError(kind.__name__)
    parts = {
        field.name: described(getattr(value, field.name), tensors, classes)
        for field in fields(value)
        if field.init
    }
    return {"class": kind.__name__, "fields": parts}


def restored(found: Any, tensors: Sequence[Tensor], classes: Mapping[str, type] = KNOWN) -> Any:  # noqa: ANN401 - JSON
    """Return the value of a description.

    Raises:
        KeyError, IndexError, TypeError: It is none of these classes.
    """
    if isinstance(found, list):
        return tuple(restored(one, tensors, classes) for one in found)
    if not isinstance(found, dict):
        return found
    if "tensor" in found:
        return tensors[found["tensor"]]
    parts = {name: restored(one, tensors, classes) for name, one in found["fields"].items()}
    return classes[found["class"]](**parts)
