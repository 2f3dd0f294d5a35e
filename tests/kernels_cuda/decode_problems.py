"""Sequences for the tests of decode attention, and rotations for those of what comes before it."""

from dataclasses import replace

import torch

from nightjar import kernels
from nightjar.kernels import CacheScales, CacheWrite, HeadNorms, Rotation, cuda
from nightjar.kernels.reference.fp8_rows import quantised
from tests.fp8 import kept
from tests.kernels_cuda.devices import moved, poisoned, random

BLOCK_SIZE = 32
CONTEXT = 50


def rotation_for(rows, n, seed=3):
    angles = random((CONTEXT, n), seed=seed)
    positions = torch.tensor([(7 * i + 3) % CONTEXT for i in range(rows)])
    return Rotation(angles.cos(), angles.sin(), positions)


class Problem:
    """Sequences of these lengths in a paged cache; what lies past their ends is NaN.

    fp8: the cache is in FP8, and what the sequences attend to is what it keeps.
    """

    def __init__(
        self, lengths, heads, kv_heads, head_size, dtype, width=None, seed=0, *, fp8=False
    ):
        self.lengths, self.heads, self.kv_heads = lengths, heads, kv_heads
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        blocks = sum(counts) + 2
        width = width or max(1, *counts)
        shuffled = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        shape = (blocks, kv_heads, BLOCK_SIZE, head_size)
        self.keys, self.values = (poisoned(shape, dtype) for _ in range(2))
        self.own_keys, self.own_values, self.block_tables = [], [], []
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            table = [shuffled.pop() for _ in range(count)]
            k, v = (random((length, kv_heads, head_size), dtype, seed=9 * i + j) for j in (1, 2))
            places = torch.arange(length)
            row_blocks = torch.tensor(table, dtype=torch.int64)[places // BLOCK_SIZE]
            kernels.kv_write(self.keys, self.values, k, v, row_blocks, places % BLOCK_SIZE)
            self.own_keys.append(k.double())
            self.own_values.append(v.double())
            # What stands in a table past the sequence's end is never followed.
            self.block_tables.append(table + [10**6] * (width - count))
        packed = random((len(lengths), heads + 2 * kv_heads, head_size), dtype, seed=5)
        self.q = packed[:, :heads]
        self.scale, self.scales = head_size**-0.5, None
        if fp8:
            cached = (quantised(cache) for cache in (self.keys, self.values))
            (self.keys, key_scales), (self.values, value_scales) = cached
            self.scales = CacheScales(key_scales, value_scales)
            for own in (self.own_keys, self.own_values):
                own[:] = [kept(x) if x.numel() else x for x in own]

    def run(self, device, rows=slice(None), lse=None):
        tables = torch.tensor(self.block_tables, dtype=torch.int32)[rows]
        lengths = torch.tensor(self.lengths, dtype=torch.int32)[rows]
        given = [x.to(device) for x in (self.keys, self.values, tables, lengths)]
        return cuda.decode_attention.decode_attention(
            self.q.to(device)[rows], *given, self.scale, lse, moved(self.scales, device)
        )

    def wanted(self):
        """In float64: [B, H, D], and the log-sum-exp of the scores [B, H]."""
        outs, lses = [], []
        shared = self.heads // self.kv_heads
        for q, *own in zip(self.q.double(), self.own_keys, self.own_values, strict=True):
            k, v = (x.repeat_interleave(shared, 1) for x in own)
            scores = torch.einsum("hd,thd->ht", q, k) * self.scale
            outs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v).nan_to_num())
            lses.append(scores.logsumexp(-1))
        return torch.stack(outs), torch.stack(lses)


class Step:
    """The newest position of a problem's sequences, which the cache does not hold yet."""

    def __init__(self, problem, norms=False, turned=0, seed=7):
        lengths = torch.tensor(problem.lengths)
        batch, size = len(problem.lengths), problem.q.shape[2]
        dtype, self.scale = problem.q.dtype, problem.scale
        self.qkv = random((batch, problem.heads + 2 * problem.kv_heads, size), dtype, seed=seed)
        newest = (lengths - 1).clamp(min=0)
        tables = torch.tensor(problem.block_tables, dtype=torch.int64)
        blocks = tables.gather(1, newest[:, None] // BLOCK_SIZE).squeeze(1)
        blocks[lengths == 0] = -1
        keys, values = problem.keys.clone(), problem.values.clone()
        scales, poisoned_too, poison = None, (keys, values), float("nan")
        if problem.scales is not None:
            scales = CacheScales(problem.scales.keys.clone(), problem.scales.values.clone())
            poisoned_too, poison = (scales.keys, scales.values), 255
        for cache in poisoned_too:
            cache[blocks[lengths > 0], :, (newest % BLOCK_SIZE)[lengths > 0]] = poison
        self.cache = CacheWrite(keys, values, blocks, newest % BLOCK_SIZE, scales)
        self.cached = tables.to(torch.int32), lengths.to(torch.int32)
        self.norms = HeadNorms(random(size, seed=4), random(size, seed=5), 1e-6) if norms else None
        angles = random((int(lengths.max()), turned), seed=3)
        self.rotation = Rotation(angles.cos(), angles.sin(), newest) if turned else None

    def run(self, device, rows=slice(None)):
        """In one launch: the result, and the cache after it."""
        cache, rotation = (moved(record, device) for record in (self._copied(), self.rotation))
        cache = replace(cache, blocks=cache.blocks[rows], offsets=cache.offsets[rows])
        if rotation is not None:
            rotation = Rotation(rotation.cosines, rotation.sines, rotation.positions[rows])
        tables, lengths = (x.to(device)[rows] for x in self.cached)
        given = self.qkv.to(device)[rows]
        norms = moved(self.norms, device)
        out = cuda.decode_attention.decode_heads(
            given, norms, rotation, cache, tables, lengths, self.scale
        )
        return out, cache

    def apart(self, device):
        """The same by `qkv_post` and `decode_attention`."""
        qkv, cache = self.qkv.to(device), moved(self._copied(), device)
        records = moved(self.norms, device), moved(self.rotation, device), cache
        heads = qkv.shape[1] - 2 * cache.keys.shape[1]
        cuda.qkv_post.qkv_post(qkv, heads, *records)
        cached = cache.keys, cache.values, *(x.to(device) for x in self.cached)
        out = cuda.decode_attention.decode_attention(
            qkv[:, :heads], *cached, self.scale, scales=cache.scales
        )
        return out, cache

    def _copied(self):
        """The cache as it was, for one run."""
        scales = self.cache.scales
        if scales is not None:
            scales = CacheScales(scales.keys.clone(), scales.values.clone())
        copies = self.cache.keys.clone(), self.cache.values.clone()
        return CacheWrite(*copies, self.cache.blocks, self.cache.offsets, scales)

    def compare(self, device):
        (out, cache), (wanted, written) = self.run(device), self.apart(device)
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)
        for got, made in ((cache.keys, written.keys), (cache.values, written.values)):
            torch.testing.assert_close(got, made, rtol=0, atol=0, equal_nan=True)
        if cache.scales is not None:
            assert torch.equal(cache.scales.keys, written.scales.keys)
            assert torch.equal(cache.scales.values, written.scales.values)
