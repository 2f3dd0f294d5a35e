"""Where the kernels of a test run, and how near to the reference they must come."""

from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from zlib import crc32

import torch

import nightjar.kernels.cuda as package
from nightjar.kernels.cuda.catalogue import by_source
from nightjar.kernels.cuda.kernel import STORAGE, Kernel
from tests.cuda_host import RawModule

SOURCES = Path(package.__file__).parent

EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}

storages = {str(dtype).removeprefix("torch."): dtype for dtype in STORAGE}


@cache
def _module(source, expressions):
    return RawModule(path=SOURCES / f"{source}.cu", name_expressions=expressions)


def run_on_host(kernel: Kernel, grid, block, args, shared_bytes):
    """A backend of nightjar.kernels.cuda.launch: tests/cuda_host."""
    if kernel not in by_source()[kernel.source]:
        raise AssertionError(f"{kernel.expression} is not in the catalogue: the gate misses it")
    function = _module(kernel.source, (kernel.expression,)).get_function(kernel.expression)
    function(grid, block, args, shared_mem=shared_bytes)


def seed_of(text: str) -> int:
    """A schedule of its own for every test, the same in every run."""
    return crc32(text.encode())


def random(shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def poisoned(shape, dtype):
    """What nobody has written."""
    return torch.full(shape, float("nan"), dtype=dtype)


def assert_near(got, wanted, ulps=4.0, absolute=1e-6):
    """got, in its own dtype, against float64: within absolute + ulps * epsilon * |wanted|.

    A failure names the worst element and both values (torch's message).
    """
    relative = ulps * EPSILON[got.dtype]
    torch.testing.assert_close(
        got.double().cpu(), wanted.double(), rtol=relative, atol=absolute, equal_nan=True
    )


def moved(record, device):
    """The record with its tensors on a device, and those of records in it."""
    if isinstance(record, torch.Tensor):
        return record.to(device)
    if not is_dataclass(record):
        return record
    values = [getattr(record, field.name) for field in fields(record)]
    return type(record)(*(moved(x, device) for x in values))
