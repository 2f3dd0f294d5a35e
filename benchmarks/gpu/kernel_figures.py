"""Figures of the machine and of single kernels: no engine."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nightjar.kernels import CacheScales, LinearWeight, cuda, pack_linear
from nightjar.kernels.cuda import launch

from .lab import BLOCK_SIZE, Lab, Points, Timing, found

READ_ROW = 4096
"""Numbers of a row, where rows are read."""


def backend(lab: Lab) -> AbstractContextManager[None]:
    """CuPy's on a GPU; on the CPU the CUDA-on-CPU host, which checks a figure's calls."""
    if lab.device == "cuda":
        return nullcontext()
    return launch.using(importlib.import_module("tests.kernels_cuda.devices").run_on_host)


def machine_speed(lab: Lab) -> Points:
    """What shares are taken of: a copy on the device, reading alone, and a matrix product."""
    size, copied = lab.scale.matmul, copy(lab)
    ways = {f"read: {name}": timing for name, timing in reads(lab).items()}
    given = [torch.randn(size, size, device=lab.device).to(lab.half) for _ in range(2)]
    product = lab.device_s(lambda: given[0] @ given[1])
    sizes = {"copy_bytes": lab.scale.copy_bytes, "product_rows": size}
    return found(
        {"copy": copied, **ways, "product": product, **sizes},
        copy_tb_s=copy_bandwidth(lab) / 1e12,
        read_tb_s=read_bandwidth(lab) / 1e12,
        product_tflop_s=2 * size**3 / product.median / 1e12,
    )


def copy(lab: Lab) -> Timing:
    """Seconds of copying `copy_bytes` on the device."""

    def measure() -> Timing:
        source = random_bytes(lab)
        target = torch.empty_like(source)
        return lab.device_s(lambda: target.copy_(source))

    return lab.kept("copy", measure)


def random_bytes(lab: Lab) -> Tensor:
    """uint8[copy_bytes], the bytes of FP32 numbers.  Zeros would flatter: on an H200 a product of
    zeros ran 13% faster than one of random numbers."""
    return torch.randn(lab.scale.copy_bytes // 4, device=lab.device).view(torch.uint8)


def copy_bandwidth(lab: Lab) -> float:
    """Bytes/s of a copy, those read and those written."""
    return 2 * lab.scale.copy_bytes / copy(lab).median


def reads(lab: Lab) -> dict[str, Timing]:
    """Seconds of reading `copy_bytes` on the device, by several kernels of torch and cuBLAS."""

    def measure() -> dict[str, Timing]:
        source = random_bytes(lab)
        parts = source.chunk(4)  # torch reduces 2 GiB and more in parts of its own choice
        vector = torch.randn(READ_ROW, device=lab.device).to(lab.half)
        half = lab.half
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "sum, FP32": lambda x: x.view(torch.float32).sum(),
            "largest of rows, 16 bits": lambda x: x.view(half).view(-1, READ_ROW).amax(1),
            "product with a vector, 16 bits": lambda x: x.view(half).view(-1, READ_ROW) @ vector,
        }
        return {
            name: lab.device_s(lambda way=way: [way(part) for part in parts])  # type: ignore[misc]
            for name, way in ways.items()
        }

    return lab.kept("reads", measure)


def read_bandwidth(lab: Lab) -> float:
    """Bytes/s of the fastest way of reading."""
    return lab.scale.copy_bytes / min(timing.median for timing in reads(lab).values())


def memory_bandwidth(lab: Lab) -> float:
    """Bytes/s that floors are taken at: the faster of reading and copying.

    A step hardly writes, so what writing costs must not lower its floor.
    """
    return max(copy_bandwidth(lab), read_bandwidth(lab))


def few_rows(*, fp8: bool) -> Callable[[Lab], Points]:
    """Products of 1 and of 8 rows with the widest weight of a layer, from a layer to the next.

    The points are shares of a copy's bandwidth: the bytes are those of the weights.
    """
    names = {rows: f"product_share_{'fp8_' if fp8 else ''}{rows}" for rows in (1, 8)}

    def measure(lab: Lab) -> Points:
        config, half = lab.scale.config(), torch.bfloat16 if fp8 else lab.half
        shape, details = (config.intermediate_size, config.hidden_size), {}
        with backend(lab):
            weights = [packed(lab, shape, half, fp8=fp8) for _ in range(config.n_layers)]
            read = config.n_layers * shape[0] * shape[1] * (1 if fp8 else half.itemsize)
            for rows, name in names.items():
                x = torch.randn(rows, shape[1], device=lab.device).to(half)
                timing = lab.device_s(lambda x=x: [w.linear(x, None, None) for w in weights])  # type: ignore[misc]
                share = read / timing.median / copy_bandwidth(lab)
                details[name] = timing.figures() | {"bytes": read, "share": share}
        return found(details, **{name: one["share"] for name, one in details.items()})

    return measure


def many_rows_in_fp8(lab: Lab) -> Points:
    """A product of square matrices in FP8, beside that of 16 bits: its rows are rounded first."""
    size = lab.scale.matmul
    with backend(lab):
        weight = packed(lab, (size, size), torch.bfloat16, fp8=True)
        x = torch.randn(size, size, device=lab.device).to(torch.bfloat16)
        timing = lab.device_s(lambda: weight.linear(x, None, None))
    return found({"product": timing}, product_fp8_tflop_s=2 * size**3 / timing.median / 1e12)


def packed(lab: Lab, shape: tuple[int, int], dtype: torch.dtype, *, fp8: bool) -> LinearWeight:
    """A random weight without a bias."""
    weight = torch.randn(shape, device=lab.device).to(dtype)
    return pack_linear(weight, None, "fp8" if fp8 else "float")


def decode_attention(group: int, *, fp8: bool = False) -> Callable[[Lab], Points]:
    """Share of the copy's bandwidth at each (batch, context); the point is the smallest.

    group: query heads of each key head; fp8: keys and values are in FP8.
    """
    point = f"attention_share_{'fp8_' if fp8 else ''}{group}"

    def measure(lab: Lab) -> Points:
        details = {}
        for batch, context in lab.scale.attention:
            timing, read = _attention(lab, batch, context, group, fp8=fp8)
            share = read / timing.median / copy_bandwidth(lab)
            details[f"{batch}x{context}"] = timing.figures() | {"bytes": read, "share": share}
            lab.collect()
        smallest = min(one["share"] for one in details.values())
        return found(details, **{point: smallest})

    return measure


def _attention(lab: Lab, batch: int, context: int, group: int, *, fp8: bool) -> tuple[Timing, int]:
    """Seconds of one layer's attention, and the bytes of the keys and values that it reads.

    There are as many key heads whatever the group, so that all groups read the same bytes.
    """
    config, layers = lab.scale.config(), lab.scale.attention_layers
    heads, size = config.n_kv_heads, config.head_size
    width = -(-context // BLOCK_SIZE)
    blocks = batch * width
    shape = (layers, blocks, heads, BLOCK_SIZE, size)
    dtype, device = lab.half, lab.device
    scales: list[CacheScales | None] = [None] * layers
    if fp8:
        keys, values = (_codes(shape, device) for _ in range(2))
        exponents = torch.full((2, *shape[:-1]), 120, dtype=torch.uint8, device=device)
        scales = [CacheScales(*exponents[:, layer]) for layer in range(layers)]
    else:
        keys, values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    q = torch.randn(batch, group * heads, size, dtype=dtype, device=device)
    # Neighbouring blocks of a sequence do not lie side by side, as in a cache that was used.
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    tables = order.view(batch, width).to(device, torch.int32)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)

    def run() -> None:
        for layer in range(layers):
            given = keys[layer], values[layer], tables, lengths
            compute = cuda.decode_attention.decode_attention
            compute(q, *given, size**-0.5, scales=scales[layer])

    with backend(lab):
        timing = lab.device_s(run)
    row = size + 1 if fp8 else size * dtype.itemsize  # a scale takes a byte
    read = 2 * batch * context * heads * row
    return Timing([seconds / layers for seconds in timing.seconds]), read


def _codes(shape: tuple[int, ...], device: str) -> Tensor:
    """Return positive numbers of FP8, each as likely as the others."""
    return torch.randint(0, 0x7F, shape, dtype=torch.uint8, device=device)
