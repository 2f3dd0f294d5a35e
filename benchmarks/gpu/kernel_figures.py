"""Figures of the machine and of single kernels: no engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nightjar.kernels import CacheWrite, Norm, cuda
from nightjar.kernels.cuda import launch
from nightjar.kernels.cuda.linear import MAX_ROWS, Factor, Next

from .lab import BLOCK_SIZE, Lab, Timing

Points = dict[str, Any]

READ_ROW = 4096
"""Numbers of a row, where rows are read."""


def backend(lab: Lab) -> AbstractContextManager[None]:
    """CuPy's on a GPU; on the CPU the host that the kernels' tests run on, which checks that the
    figure asks its kernels for what they have."""
    if lab.device == "cuda":
        return nullcontext()
    return launch.using(importlib.import_module("tests.kernels_cuda.devices").run_on_host)


def machine_speed(lab: Lab) -> Points:
    """What the shares are taken of: a copy on the device, read and written; reading alone; and a
    product."""
    size, scale = lab.scale.matmul, lab.scale
    copy_s, read_s = copy(lab), reads(lab)
    given = [torch.randn(size, size, device=lab.device).to(lab.half) for _ in range(2)]
    product = lab.device_s(lambda: given[0] @ given[1])
    return {
        "points": {
            "copy_tb_s": copy_bandwidth(lab) / 1e12,
            "read_tb_s": read_bandwidth(lab) / 1e12,
            "product_tflop_s": 2 * size**3 / product.median / 1e12,
        },
        "details": {
            "copy_bytes": scale.copy_bytes,
            "copy": copy_s.figures(),
            **{f"read: {name}": timing.figures() for name, timing in read_s.items()},
            "product_rows": size,
            "product": product.figures(),
        },
    }


def copy(lab: Lab) -> Timing:
    """Seconds of copying `copy_bytes` on the device."""

    def measure() -> Timing:
        source = _random_bytes(lab)
        target = torch.empty_like(source)
        return lab.device_s(lambda: target.copy_(source))

    found = lab.kept("copy", measure)
    lab.collect()
    return found


def _random_bytes(lab: Lab) -> Tensor:
    """uint8[copy_bytes], the bytes of FP32 numbers.  Zeros would flatter: on an H200 a product of
    zeros ran 13% faster than one of random numbers."""
    return torch.randn(lab.scale.copy_bytes // 4, device=lab.device).view(torch.uint8)


def copy_bandwidth(lab: Lab) -> float:
    """Bytes/s of a copy, those read and those written."""
    return 2 * lab.scale.copy_bytes / copy(lab).median


def reads(lab: Lab) -> dict[str, Timing]:
    """Seconds of reading `copy_bytes` on the device, by several kernels of torch and cuBLAS: what
    the fastest of them does, memory can."""

    def measure() -> dict[str, Timing]:
        source = _random_bytes(lab)
        parts = source.chunk(4)  # torch reduces 2 GiB and more in parts of its own choice
        vector = torch.randn(READ_ROW, device=lab.device).to(lab.half)
        single, half = torch.float32, lab.half
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "sum, FP32": lambda x: x.view(single).sum(),
            "largest, FP32": lambda x: x.view(single).amax(),
            "largest, 16 bits": lambda x: x.view(half).amax(),
            "sums of rows, FP32": lambda x: x.view(single).view(-1, READ_ROW).sum(1),
            "largest of rows, 16 bits": lambda x: x.view(half).view(-1, READ_ROW).amax(1),
            "product with a vector, 16 bits": lambda x: x.view(half).view(-1, READ_ROW) @ vector,
        }
        return {
            name: lab.device_s(lambda way=way: [way(part) for part in parts])  # type: ignore[misc]
            for name, way in ways.items()
        }

    found = lab.kept("reads", measure)
    lab.collect()
    return found


def read_bandwidth(lab: Lab) -> float:
    """Bytes/s of the fastest way of reading."""
    return lab.scale.copy_bytes / min(timing.median for timing in reads(lab).values())


def memory_bandwidth(lab: Lab) -> float:
    """Bytes/s that floors are taken at: reading or copying, whichever is the faster, as a step that
    hardly writes must not be held against what writing costs."""
    return max(copy_bandwidth(lab), read_bandwidth(lab))


def decode_attention(group: int, point: str) -> Callable[[Lab], Points]:
    """Share of the copy's bandwidth at each (batch, context); the point is the smallest.

    group: query heads of each key head.
    """

    def measure(lab: Lab) -> Points:
        shares, details = {}, {}
        for batch, context in lab.scale.attention:
            timing, read = _attention(lab, batch, context, group)
            share = read / timing.median / copy_bandwidth(lab)
            shares[f"{batch}x{context}"] = share
            details[f"{batch}x{context}"] = timing.figures() | {"bytes": read, "share": share}
            lab.collect()
        return {"points": {point: min(shares.values())}, "details": details}

    return measure


def _attention(lab: Lab, batch: int, context: int, group: int) -> tuple[Timing, int]:
    """Seconds of one layer's attention, and the bytes of the keys and values that it reads.

    There are as many key heads whatever the group, so that all groups read the same bytes.
    """
    config, layers = lab.scale.config(), lab.scale.attention_layers
    heads, size = config.n_kv_heads, config.head_size
    width = -(-context // BLOCK_SIZE)
    blocks = batch * width
    shape = (layers, blocks, heads, BLOCK_SIZE, size)
    dtype, device = lab.half, lab.device
    keys, values = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    q = torch.randn(batch, group * heads, size, dtype=dtype, device=device)
    # Neighbouring blocks of a sequence do not lie side by side, as in a cache that was used.
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    tables = order.view(batch, width).to(device, torch.int32)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)

    def run() -> None:
        for layer in range(layers):
            given = keys[layer], values[layer], tables, lengths
            cuda.decode_attention.decode_attention(q, *given, size**-0.5)

    with backend(lab):
        timing = lab.device_s(run)
    read = 2 * batch * context * heads * size * dtype.itemsize
    return Timing(tuple(seconds / layers for seconds in timing.seconds)), read


def small_kernels(lab: Lab) -> Points:
    """Share of the copy's bandwidth of other kernels of a decode step, at the largest batch.

    Each is launched on tensors of its own as often as no cache holds them all, results included.
    """
    details = {}
    with backend(lab):
        for name, make, moved in _calls(lab):
            calls = [make() for _ in range(-(-lab.scale.cold_bytes // moved))]
            timing = lab.device_s(lambda calls=calls: [call() for call in calls])  # type: ignore[misc]
            one = Timing(tuple(seconds / len(calls) for seconds in timing.seconds))
            share = moved / one.median / copy_bandwidth(lab)
            details[name] = one.figures() | {"bytes": moved, "calls": len(calls), "share": share}
            del calls
            lab.collect()
    return {"points": {}, "details": details}


def _calls(lab: Lab) -> Iterator[tuple[str, Callable[[], Callable[[], object]], int]]:
    """Each kernel's name, what makes a call with new tensors, and the bytes that docs/cuda.md
    states for it."""
    config, dtype = lab.scale.config(), lab.half
    batch, s = max(lab.scale.batches), dtype.itemsize
    width, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size

    def made(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=lab.device).to(dtype)

    ones, zeros = (make(width, device=lab.device) for make in (torch.ones, torch.zeros))

    def layer_norm() -> Callable[[], object]:
        stream, delta = made(batch, width, dtype=torch.float32), made(batch, width)
        return lambda: cuda.norm.layer_norm(stream, delta, ones, zeros, 1e-5, dtype)

    def activation() -> Callable[[], object]:
        x = made(batch, inner)
        return lambda: cuda.activation.activation(x, "gelu_tanh")

    def qkv_post() -> Callable[[], object]:
        qkv = made(batch, config.n_heads + 2 * config.n_kv_heads, config.head_size)
        shape = (batch, config.n_kv_heads, BLOCK_SIZE, config.head_size)
        keys, values = made(*shape), made(*shape)
        blocks = torch.arange(batch, device=lab.device)
        cache = CacheWrite(keys, values, blocks, torch.zeros_like(blocks))
        return lambda: cuda.qkv_post.qkv_post(qkv, config.n_heads, cache=cache)

    def argmax() -> Callable[[], object]:
        logits = made(batch, vocab, dtype=torch.float32)
        return lambda: cuda.argmax.best_tokens(logits)

    heads = 2 * config.n_heads + 5 * config.n_kv_heads
    yield "layer_norm", layer_norm, batch * width * (8 + 2 * s)
    yield "activation", activation, 2 * batch * inner * s
    yield "qkv_post", qkv_post, batch * config.head_size * s * heads
    yield "argmax", argmax, 4 * batch * vocab


def few_rows(lab: Lab) -> Points:
    """Share of the copy's bandwidth of a decode step's products of few rows: by the kernel that has
    the norm before and the activation or the addition after it in itself, each by itself and as in
    a step, where it asks for the next one's weights ahead; and by cuBLAS alone."""
    config, details = lab.scale.config(), {}
    width, inner = config.hidden_size, config.intermediate_size
    ones, zeros = (make(width, device=lab.device) for make in (torch.ones, torch.zeros))
    norm = Norm(ones, zeros, 1e-5)

    def plain(x: Tensor, factor: Factor, following: Next) -> Tensor:
        return F.linear(x, *factor)

    def alone(run: Callable[..., object]) -> Callable[..., object]:
        return lambda factor, following: run(factor)

    with backend(lab):
        for batch in (size for size in lab.scale.batches if size <= MAX_ROWS):
            stream = torch.randn(batch, width, device=lab.device)
            x = torch.randn(batch, inner, device=lab.device).to(lab.half)
            up = partial(cuda.linear.normed_linear, stream, norm, activation="gelu_tanh")
            down = partial(cuda.linear.linear_onto, stream, x)
            narrow = x[:, :width].contiguous()
            for name, outputs, inputs, run in (
                (f"up of {batch}, with norm and activation", inner, width, alone(up)),
                (f"up of {batch}, and the next ahead", inner, width, up),
                (f"up of {batch}, by cuBLAS", inner, width, partial(plain, narrow)),
                (f"down of {batch}, with the addition", width, inner, alone(down)),
                (f"down of {batch}, and the next ahead", width, inner, down),
                (f"down of {batch}, by cuBLAS", width, inner, partial(plain, x)),
            ):
                details[name] = _product(lab, outputs, inputs, run)
                lab.collect()
    return {"points": {}, "details": details}


def _product(lab: Lab, outputs: int, inputs: int, run: Callable[..., object]) -> dict[str, Any]:
    """One product, with the weights of several layers in turn, so that no cache holds them.

    run: given a factor, and as `following` the weight of the next.
    """
    layers = lab.scale.attention_layers

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device=lab.device).to(lab.half)

    factors = [(made(outputs, inputs), made(outputs)) for _ in range(layers)]
    ahead = [(weight,) for weight, _ in factors[1:] + factors[:1]]
    pairs = list(zip(factors, ahead, strict=True))
    timing = lab.device_s(lambda: [run(factor, following=after) for factor, after in pairs])
    one = Timing(tuple(seconds / layers for seconds in timing.seconds))
    read = outputs * inputs * lab.half.itemsize
    return one.figures() | {"bytes": read, "share": read / one.median / copy_bandwidth(lab)}


def kv_transfer(lab: Lab) -> Points:
    """Cache blocks to pinned host memory and back: bytes/s, and milliseconds of the tokens that a
    conversation's earlier turns have."""
    config, tokens = lab.scale.config(), lab.scale.cached_tokens[0]
    count = -(-tokens // BLOCK_SIZE)
    shape = (config.n_layers, count, config.n_kv_heads, BLOCK_SIZE, config.head_size)
    keys, values = (torch.randn(shape, device=lab.device).to(lab.half) for _ in range(2))
    packed = torch.empty(
        (count, config.n_layers, 2, *shape[2:]), dtype=lab.half, pin_memory=lab.device == "cuda"
    )
    blocks = torch.arange(count, device=lab.device)
    points, details = {}, {}
    with backend(lab):
        ways = ("pack", cuda.kv_transfer.kv_pack), ("unpack", cuda.kv_transfer.kv_unpack)
        for name, run in ways:
            timing = lab.device_s(lambda run=run: run(keys, values, blocks, packed))  # type: ignore[misc]
            moved = packed.numel() * packed.element_size()
            points[f"kv_{name}_gb_s"] = moved / timing.median / 1e9
            details[name] = timing.figures() | {"bytes": moved, "tokens": tokens}
    return {"points": points, "details": details}
