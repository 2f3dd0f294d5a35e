"""What a launch is given, checked against the kernel's parameters and laid out as it reads it.

Arrays are copied to memory of their own, and copied back after the launch. A wide margin keeps an
index that is off from landing in another array.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_MARGIN_BYTES = 1 << 20
_DEVICE_ALIGNMENT = 256  # of what cudaMalloc returns: alignment within it is kept

# numpy's and torch's types as letter of include/cuda_host/entry.h and bytes.
_FLOAT, _BFLOAT, _SIGNED, _UNSIGNED, _BOOL = "fbiu?"
_TORCH_LETTERS = {"bfloat16": _BFLOAT, "bool": _BOOL, "uint8": _UNSIGNED, "uint16": _UNSIGNED}
_TORCH_LETTERS |= {"uint32": _UNSIGNED, "uint64": _UNSIGNED}
_NAMES = {"f": "floating point", "b": "bfloat16", "i": "signed", "u": "unsigned", "?": "bool"}


class ParameterLayout(ctypes.Structure):
    """`cuda_host::Parameter`."""

    _fields_ = (
        ("kind", ctypes.c_char),
        ("pointee", ctypes.c_char),
        ("read_only", ctypes.c_uint8),
        ("bytes", ctypes.c_uint32),
        ("pointee_bytes", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel; letters as in include/cuda_host/entry.h."""

    kind: str
    pointee: str
    read_only: bool
    n_bytes: int
    pointee_bytes: int


@dataclass(frozen=True)
class Span:
    """The memory from an array's first byte to behind its last."""

    address: int
    n_bytes: int
    misalignment: int  # of its first byte, within the allocation that it is part of
    letter: str
    item_bytes: int


@dataclass
class Buffer:
    """Memory of its own for one array, or for several that overlap."""

    names: list[str]
    address: int
    n_bytes: int
    misalignment: int
    read_only: bool
    memory: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def copy_address(self) -> int:
        """Where the kernel finds it."""
        start = self.memory.ctypes.data + _MARGIN_BYTES
        return start + (self.misalignment - start) % _DEVICE_ALIGNMENT

    def copy_in(self) -> None:
        """Make the copy."""
        total = self.n_bytes + 2 * _MARGIN_BYTES + _DEVICE_ALIGNMENT
        self.memory = np.empty(total, np.uint8)
        ctypes.memmove(self.copy_address, self.address, self.n_bytes)

    def copy_out(self) -> None:
        """Write the copy back, unless the kernel could not have changed it."""
        if not self.read_only:
            ctypes.memmove(self.address, self.copy_address, self.n_bytes)


class Arguments:
    """The arguments of one launch.

    Args:
        kernel: Its name, for messages.
        parameters: What it takes.
        given: torch CPU tensors or numpy arrays for pointers, None for a null pointer, and
            numpy scalars. Python's bool, int and float are one, eight and eight bytes wide, as
            CuPy has it.

    Raises:
        TypeError: Number, size or type differ from the kernel's parameters.
    """

    def __init__(self, kernel: str, parameters: Sequence[Parameter], given: Sequence[Any]) -> None:
        if len(given) != len(parameters):
            raise TypeError(f"{kernel} takes {len(parameters)} arguments, {len(given)} given")
        self._spans: dict[int, Span] = {}
        self._values: list[Any] = [None] * len(given)
        for number, (parameter, value) in enumerate(zip(parameters, given, strict=True)):
            where = f"{kernel}, argument {number}"
            if parameter.kind == "*":
                if value is not None:
                    self._spans[number] = _checked_span(where, parameter, value)
            else:
                self._values[number] = _scalar_bytes(where, parameter, value)
        self.buffers = _buffers(self._spans, parameters)

    def copy_in(self) -> None:
        """Give every array its copy."""
        for buffer in self.buffers:
            buffer.copy_in()
        for number, span in self._spans.items():
            buffer = next(b for b in self.buffers if f"argument {number}" in b.names)
            address = buffer.copy_address + span.address - buffer.address
            self._values[number] = np.uint64(address).tobytes()

    def copy_out(self) -> None:
        """Bring back what the kernel wrote."""
        for buffer in self.buffers:
            buffer.copy_out()

    def pointers(self) -> ctypes.Array[Any]:
        """A `void*[]` with the address of each argument."""
        null = np.uint64(0).tobytes()
        cells = [
            ctypes.create_string_buffer(v or null, max(len(v or null), 16)) for v in self._values
        ]
        array = (ctypes.c_void_p * max(len(cells), 1))(*map(ctypes.addressof, cells))
        array.kept_alive = cells  # type: ignore[attr-defined]
        return array


def _checked_span(where: str, parameter: Parameter, value: Any) -> Span:
    if not (hasattr(value, "data_ptr") or isinstance(value, np.ndarray)):
        raise TypeError(
            f"{where} is a pointer: give a numpy array, a torch CPU tensor or None, "
            f"not {value!r} (an address alone does not say how much may be accessed)"
        )
    span = _torch_span(where, value) if hasattr(value, "data_ptr") else _numpy_span(value)
    if not _points_to(parameter, span):
        raise TypeError(
            f"{where} points to {_NAMES.get(parameter.pointee, '')} elements of "
            f"{parameter.pointee_bytes} bytes; the array given has {_NAMES[span.letter]} ones of "
            f"{span.item_bytes}"
        )
    return span


def _points_to(parameter: Parameter, span: Span) -> bool:
    if parameter.pointee in "vx" or parameter.pointee_bytes == 1:
        return True  # void, bytes, and vector types: a view of anything
    if parameter.pointee_bytes != span.item_bytes:
        return False
    integers = (_SIGNED, _UNSIGNED)
    if parameter.pointee in integers:
        return span.letter in integers  # torch does without most unsigned types
    return parameter.pointee == span.letter


def _torch_span(where: str, tensor: Any) -> Span:
    if tensor.device.type != "cpu":
        raise TypeError(f"{where}: a tensor on {tensor.device}; the CUDA host takes CPU tensors")
    item = tensor.element_size()
    letter = _TORCH_LETTERS.get(str(tensor.dtype).removeprefix("torch."))
    letter = letter or (_FLOAT if tensor.dtype.is_floating_point else _SIGNED)
    items = 0
    if tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        items = 1 + sum((size - 1) * stride for size, stride in steps)
    return Span(tensor.data_ptr(), items * item, tensor.storage_offset() * item, letter, item)


def _numpy_span(array: np.ndarray) -> Span:
    low, high = np.lib.array_utils.byte_bounds(array)
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    start = np.lib.array_utils.byte_bounds(owner)[0]
    n_bytes = high - low if array.size else 0
    letter = _BOOL if array.dtype.kind == "b" else array.dtype.kind
    return Span(low, n_bytes, low - start, letter, array.itemsize)


def _scalar_bytes(where: str, parameter: Parameter, value: Any) -> bytes:
    if value is None or isinstance(value, np.ndarray) or hasattr(value, "data_ptr"):
        raise TypeError(f"{where} is a value of {parameter.n_bytes} bytes, not a pointer")
    scalar = np.asarray(value)
    letter = _BOOL if scalar.dtype.kind == "b" else scalar.dtype.kind
    alike = letter == parameter.kind or {letter, parameter.kind} == {_SIGNED, _UNSIGNED}
    opaque = parameter.kind == "x" and letter in "Vu"
    if scalar.nbytes != parameter.n_bytes or not (alike or opaque):
        raise TypeError(
            f"{where} is {_NAMES.get(parameter.kind, 'a struct')} of {parameter.n_bytes} bytes; "
            f"{value!r} is {scalar.dtype} of {scalar.nbytes} (give np.int32, np.float32, ...)"
        )
    return scalar.tobytes()


def _buffers(spans: dict[int, Span], parameters: Sequence[Parameter]) -> list[Buffer]:
    """One buffer for each group of spans that overlap."""
    buffers: list[Buffer] = []
    for number, span in sorted(spans.items(), key=lambda item: item[1].address):
        read_only, name = parameters[number].read_only, f"argument {number}"
        last = buffers[-1] if buffers else None
        if last and span.n_bytes and span.address < last.address + last.n_bytes:
            last.names.append(name)
            end = max(last.address + last.n_bytes, span.address + span.n_bytes)
            last.n_bytes = end - last.address
            last.read_only &= read_only
        else:
            misalignment = span.misalignment % _DEVICE_ALIGNMENT
            buffers.append(Buffer([name], span.address, span.n_bytes, misalignment, read_only))
    return buffers
