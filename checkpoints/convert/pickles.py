"""Reads pickles of PyTorch without running anything that they name.

A pickle may name any function and call it.  Here every name becomes an `Opaque` class that only
keeps what it is given.  Exceptions are dictionaries, and the functions of PyTorch that describe a
tensor: they become a `TensorReference`, and no weight is read.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any, Self

from nightjar.checkpoints.errors import CheckpointError
from nightjar.checkpoints.safetensors_header import ITEM_BITS

STORAGE_DTYPES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "UntypedStorage": "U8",
    "BoolStorage": "BOOL",
}
TORCH_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint8": "U8",
}
MAX_RANK = 8  # of a tensor


@dataclass(frozen=True, slots=True)
class StorageReference:
    """A flat block of numbers in the file: its key, its dtype, how many it holds."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class TensorReference:
    """A tensor within a storage; offset and strides are in elements."""

    storage: StorageReference
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Opaque:
    """An object of a class that is not loaded: it keeps its arguments, items and state.

    module, name: the class that the pickle names.
    """

    module = ""
    name = ""

    arguments: tuple[object, ...]
    state: dict[str, Any]
    entries: dict[Any, Any]

    def __new__(cls, *arguments: object, **_: object) -> Self:
        """Keep the arguments; pickles make some objects without a call of `__init__`."""
        made = super().__new__(cls)
        made.arguments, made.state, made.entries = arguments, {}, {}
        return made

    def __init__(self, *arguments: object, **_: object) -> None:
        """Take any arguments."""

    def __setstate__(self, state: object) -> None:
        """Keep a dictionary of attributes; other states are of no use here."""
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.state.update(part)

    def __setitem__(self, key: object, value: object) -> None:
        try:
            self.entries[key] = value
        except TypeError as error:
            raise pickle.UnpicklingError(f"an unhashable key in {self.name}") from error

    def append(self, value: object) -> None:
        """Take an item of a list-like class, which is of no use here."""

    def extend(self, values: Iterable[object]) -> None:
        """Take items of a list-like class, which are of no use here."""

    add = append


def read_pickle(file: IO[bytes], where: str) -> tuple[Any, dict[str, StorageReference]]:
    """Read one pickle.

    file: is read no further than the pickle's end, if it can be peeked into.
    where: names the file in errors.

    Returns:
        The object, and each storage that it names, by key.

    Raises:
        CheckpointError: The pickle is damaged, or describes what no tensor is.
    """
    reader = _Reader(file)
    try:
        return reader.load(), reader.storages
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        kind = type(error).__name__
        raise CheckpointError(
            f"{where}: the pickle cannot be read ({kind}: {error}); copy the file again"
        ) from error


class _Reader(pickle._Unpickler):
    """An unpickler that imports nothing.

    It is the one written in Python: its memory is bounded by the pickle's size, while the one in C
    makes a table as large as the largest index that a pickle names.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin-1")
        self.storages: dict[str, StorageReference] = {}

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as in the base class
        """Return what stands for a name: nothing is imported."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        build = _BUILDERS.get((module, name))
        if build is not None:
            # A pickle can change attributes of what it names: each gets a function of its own.
            return lambda *arguments: build(*arguments)  # noqa: PLW0108
        if module in ("torch", "torch.storage") and name in STORAGE_DTYPES:
            return _storage_class(name)
        return type("Opaque", (Opaque,), {"module": module, "name": name})

    def persistent_load(self, pid: object) -> StorageReference:
        """Return the storage that a tensor lies in: ('storage', class, key, device, count)."""
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise pickle.UnpicklingError(f"an unknown reference {pid!r:.100}")
        dtype = getattr(pid[1], "dtype", None)
        key, count = str(pid[2]), pid[4]
        if dtype not in ITEM_BITS or type(count) is not int or count < 0:
            raise pickle.UnpicklingError(f"an unknown storage {key!r:.100}")
        found = StorageReference(key, dtype, count)
        if self.storages.setdefault(key, found) != found:
            raise pickle.UnpicklingError(f"storage {key!r:.100} is described twice")
        return found


class _StorageClass:
    """Stands for a class of storages; its device does not matter."""

    dtype = ""


def _storage_class(name: str) -> type[_StorageClass]:
    return type(name, (_StorageClass,), {"dtype": STORAGE_DTYPES[name]})


def _tensor(
    storage: object, offset: object, shape: object, strides: object, *rest: object
) -> TensorReference:
    """Describe a tensor, as `torch._utils._rebuild_tensor_v2` would build it."""
    return _reference(storage, None, offset, shape, strides)


def _typed_tensor(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    _requires_grad: object,
    _hooks: object,
    dtype: object,
    *rest: object,
) -> TensorReference:
    """Describe a tensor in an untyped storage, as `_rebuild_tensor_v3` would build it."""
    name = TORCH_DTYPES.get(getattr(dtype, "name", ""))
    if name is None:
        raise pickle.UnpicklingError("a tensor of an unknown dtype")
    return _reference(storage, name, offset, shape, strides)


def _reference(
    storage: object, dtype: str | None, offset: object, shape: object, strides: object
) -> TensorReference:
    if not isinstance(storage, StorageReference):
        raise pickle.UnpicklingError("a tensor without a storage")
    sizes, steps = sizes_of(shape), sizes_of(strides)
    if type(offset) is not int or offset < 0 or len(sizes) != len(steps):
        raise pickle.UnpicklingError("a tensor with impossible sizes")
    return TensorReference(storage, dtype or storage.dtype, offset, sizes, steps)


def sizes_of(value: object) -> tuple[int, ...]:
    """Return the sizes of a tensor, as a tuple or a torch.Size gives them."""
    if isinstance(value, Opaque):  # torch.Size
        value = value.arguments[0] if value.arguments else ()
    if not isinstance(value, tuple | list) or len(value) > MAX_RANK:
        raise pickle.UnpicklingError("a tensor with impossible sizes")
    if any(type(size) is not int or size < 0 for size in value):
        raise pickle.UnpicklingError("a tensor with impossible sizes")
    return tuple(value)


def _parameter(data: object, *_: object) -> object:
    """Return the tensor of a parameter."""
    return data


_BUILDERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}
