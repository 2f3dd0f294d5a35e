"""Prompt rows and a paged cache, for the tests of their attention."""

import torch

from nightjar import kernels
from nightjar.kernels import CacheScales
from nightjar.kernels.cuda.paged_prefill import TILE_ROWS, Span, TileArrays, paged_prefill
from nightjar.kernels.layout import Tables
from nightjar.kernels.reference.fp8_rows import quantised
from tests.fp8 import kept
from tests.kernels_cuda.devices import EPSILON, assert_near, moved, poisoned, random

KEYS = 32  # positions of a tile of keys, as in prompt_rows.cuh

WEIGHT_ERRORS = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2e-6}
"""Weights are multiplied in 16 bits: each is off by half an epsilon, and no sum by more."""


class Prompts:
    """Rows of sequences in a paged cache, and what each of them sees.

    spans: the positions [start, end) of each sequence's rows; all before them are cached too.  What
    lies past the ends is NaN.  causal: a row sees everything up to itself; else it sees `end`.
    fp8: the cache is in FP8, and what the rows attend to is what it keeps.
    """

    def __init__(
        self,
        spans,
        heads,
        kv_heads,
        head_size,
        dtype,
        *,
        causal=True,
        spread=1.0,
        block_size=KEYS,
        fp8=False,
    ):
        self.spans, self.heads, self.kv_heads, self.causal = spans, heads, kv_heads, causal
        self.block_size = block_size
        counts = [-(-end // block_size) for _, end in spans]
        blocks = sum(counts) + 2
        shuffled = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).tolist()
        shape = (blocks, kv_heads, block_size, head_size)
        self.keys, self.values = (poisoned(shape, dtype) for _ in range(2))
        self.own, self.tables = [], []
        for i, ((_, end), count) in enumerate(zip(spans, counts, strict=True)):
            table = [shuffled.pop() for _ in range(count)]
            k, v = (random((end, kv_heads, head_size), dtype, seed=9 * i + j) for j in (1, 2))
            places = torch.arange(end)
            rows = torch.tensor(table, dtype=torch.int64)[places // block_size]
            kernels.kv_write(self.keys, self.values, k, v, rows, places % block_size)
            self.own.append((k.double(), v.double()))
            self.tables.append(table)
        lengths = [end - start for start, end in spans] if causal else [5] * len(spans)
        packed = random((sum(lengths), heads + 2 * kv_heads, head_size), dtype, seed=5)
        self.q = (packed * spread)[:, :heads]
        self.lengths, self.scale, self.scales = lengths, head_size**-0.5, None
        if fp8:
            (self.keys, of_keys), (self.values, of_values) = map(
                quantised, (self.keys, self.values)
            )
            self.scales = CacheScales(of_keys, of_values)
            self.own = [tuple(kept(x) if len(x) else x for x in own) for own in self.own]

    def rescale(self, sequence, of_keys, of_values):
        """Multiply the cached rows of a sequence in FP8 by powers of two: exponents [end] each."""
        places = torch.arange(len(of_keys))
        blocks = torch.tensor(self.tables[sequence])[places // self.block_size]
        at = blocks, slice(None), places % self.block_size
        for scales, exponents in zip(
            (self.scales.keys, self.scales.values), (of_keys, of_values), strict=True
        ):
            scales[at] = (scales[at] + exponents[:, None]).to(torch.uint8)
        self.own[sequence] = tuple(
            own * 2.0 ** exponents[:, None, None]
            for own, exponents in zip(self.own[sequence], (of_keys, of_values), strict=True)
        )

    def tiles(self, device, chosen=slice(None)):
        """Of some sequences, whose rows then come first in q."""
        spans, first = [], 0
        for (start, end), rows in zip(self.spans[chosen], self.lengths[chosen], strict=True):
            spans.append(Span(first, rows, start + 1 if self.causal else end))
            first += rows
        widths = [len(table) for table in self.tables[chosen]]
        shared, rows = self.heads // self.kv_heads, TILE_ROWS[self.q.dtype]
        tables = Tables.build(self.tables[chosen])
        return TileArrays.of(tables, spans, widths, shared, rows).on(torch.device(device))

    def run(self, device, lse=None, tiles=None):
        tiles = tiles or self.tiles(device)
        given = [x.to(device) for x in (self.q, self.keys, self.values)]
        scales = moved(self.scales, device)
        return paged_prefill(*given, tiles, self.scale, causal=self.causal, lse=lse, scales=scales)

    def wanted(self, change=lambda values: values):
        """In float64: [T, H, D], and the log-sum-exp of the scores [T, H].

        change: what is made of the values first.
        """
        outs, lses, shared = [], [], self.heads // self.kv_heads
        for q, (k, v), (start, end) in zip(
            self.q.double().split(self.lengths), self.own, self.spans, strict=True
        ):
            wide_k, wide_v = (x.repeat_interleave(shared, 1) for x in (k, change(v)))
            scores = torch.einsum("qhd,khd->qhk", q, wide_k) * self.scale
            if self.causal:
                hidden = torch.arange(end)[None] > torch.arange(start, end)[:, None]
                scores.masked_fill_(hidden[:, None], float("-inf"))
            outs.append(torch.einsum("qhk,khd->qhd", scores.softmax(-1), wide_v).nan_to_num())
            lses.append(scores.logsumexp(-1))
        return torch.cat(outs), torch.cat(lses)

    def compare(self, device):
        lse = torch.full(self.q.shape[:2], float("nan"), device=device)
        out, (wanted, wanted_lse) = self.run(device, lse), self.wanted()
        half = WEIGHT_ERRORS[self.q.dtype]
        largest = max((float(v.abs().max()) for _, v in self.own if len(v)), default=0.0)
        assert_near(out, wanted, absolute=half * largest)
        assert_near(lse, wanted_lse, absolute=max(half, 1e-5) * 1.5)

    def compare_each(self, device, found=None):
        """Compare what is found, or what the kernel computes, where values differ much in size.

        A number is off by no more than its own terms.  A term too small for FP16 beside the row's
        largest one may be off by what FP16 leaves of it.
        """
        found = (self.run(device) if found is None else found).double().cpu()
        wanted = self.wanted()[0]
        terms, half = self.wanted(torch.abs)[0], WEIGHT_ERRORS[self.q.dtype]
        most = max(end for _, end in self.spans)
        rounded = wanted.to(self.q.dtype).double()
        bound = half * terms + most * 2.0**-24 * terms.amax(-1, keepdim=True)
        bound += 2 * (rounded - wanted).abs() + EPSILON[self.q.dtype] * wanted.abs()
        bound += torch.finfo(self.q.dtype).smallest_normal * EPSILON[self.q.dtype]
        worst = ((found - wanted).abs() / bound).max()
        assert worst <= 1, f"{float(worst)} times the bound"
