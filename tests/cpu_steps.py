"""Steps of attention over a paged cache, for the tests of the CPU kernels."""

from dataclasses import dataclass, replace

import torch

from nightjar import kernels
from nightjar.kernels import (
    Branch,
    BranchLayout,
    CacheWrite,
    Chunk,
    ChunkLayout,
    HeadNorms,
    PagedLayout,
    Rotation,
    StepRows,
    padded_length,
)
from tests.cpu_attention import causal, naive

BLOCK = 32


CONTEXT = 128


KINDS = [("prompt",), ("running",), ("document",), ("prompt", "running", "document")]


@dataclass(frozen=True)
class Sequence:
    """earlier: its tokens that are cached already; new: rows of this step, of which a document's
    are not cached."""

    kind: str
    earlier: int
    new: int
    table: tuple[int, ...]


SEQUENCES = [
    Sequence("prompt", 40, 33, (7, 0, 3)),
    Sequence("prompt", 0, 5, (5,)),
    Sequence("running", 20, 1, (1,)),
    Sequence("running", 33, 1, (8, 2)),
    Sequence("document", 37, 5, (6, 4)),
    Sequence("document", 37, 17, (6, 4)),
]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Step:
    """Return some of SEQUENCES in one step, over a cache with zeros where no row was written."""

    def __init__(self, kinds, shape, *, dtype=torch.float32, normed=True, pairs=0):
        self.heads, self.kv_heads, self.size = shape
        self.sequences = [s for s in SEQUENCES if s.kind in kinds]
        self.keys, self.values = (
            (random(9, self.kv_heads, BLOCK, self.size, seed=seed)).to(dtype) for seed in (1, 2)
        )
        rows = sum(s.new for s in self.sequences)
        # Rows are those of the whole list: the company must not change them.
        every = random(sum(s.new for s in SEQUENCES), self.heads + 2 * self.kv_heads, self.size)
        starts = [sum(s.new for s in SEQUENCES[:i]) for i in range(len(SEQUENCES))]
        own = [starts[SEQUENCES.index(s)] + i for s in self.sequences for i in range(s.new)]
        self.qkv = every[own].to(dtype)
        assert self.qkv.shape[0] == rows
        positions = [s.earlier + i for s in self.sequences for i in range(s.new)]
        self.norms = None
        if normed:
            query, key = random(2, self.size, seed=3)
            self.norms = HeadNorms(query, key, 1e-5)
        self.rotation = None
        if pairs:
            angles = random(CONTEXT, pairs, seed=4)
            self.rotation = Rotation(angles.cos(), angles.sin(), torch.tensor(positions))

    def write(self):
        """Where the rows of prompts and running texts go."""
        places = [
            (s.table[p // BLOCK], p % BLOCK)
            for s in self.sequences
            if s.kind != "document"
            for p in range(s.earlier, s.earlier + s.new)
        ]
        blocks, offsets = torch.tensor(places, dtype=torch.int64).view(-1, 2).unbind(1)
        return CacheWrite(
            self.keys.clone(), self.values.clone(), blocks.contiguous(), offsets.contiguous()
        )

    def rows(self):
        """The layouts of the kinds that are there."""
        prompts, running, documents = (
            [s for s in self.sequences if s.kind == kind]
            for kind in ("prompt", "running", "document")
        )
        chunks = [Chunk(s.table, s.earlier, s.earlier + s.new) for s in prompts]
        branches = [Branch(s.new, padded_length(s.new), 0) for s in documents]
        return StepRows(
            ChunkLayout.build(chunks, BLOCK) if prompts else None,
            PagedLayout.build(
                [s.table for s in running], [s.earlier + s.new for s in running], BLOCK
            )
            if running
            else None,
            BranchLayout.build(branches, [documents[0].table], [documents[0].earlier])
            if documents
            else None,
        )

    def run(self, scale, wanted=None):
        """The result, and the cache after it."""
        write, rows = self.write(), replace(self.rows(), wanted=wanted)
        out = kernels.attend(self.qkv.clone(), self.norms, self.rotation, write, rows, scale)
        return out, write

    def prepared(self):
        """Queries, keys and values in float64, rounded to how they are kept."""
        wide = self.qkv.double()
        split = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = wide.split(split, dim=1)
        if self.norms is not None:
            for part, weight in ((q, self.norms.query), (k, self.norms.key)):
                size = (part.square().mean(-1, keepdim=True) + self.norms.epsilon).sqrt()
                part.div_(size).mul_(weight.double())
        if self.rotation is not None:
            n = self.rotation.cosines.shape[1]
            cosines, sines = (
                table.double()[self.rotation.positions].unsqueeze(1)
                for table in (self.rotation.cosines, self.rotation.sines)
            )
            for part in (q, k):
                first, second = part[..., :n].clone(), part[..., n : 2 * n].clone()
                part[..., :n] = first * cosines - second * sines
                part[..., n : 2 * n] = second * cosines + first * sines
        return tuple(x.to(self.keys.dtype).double() for x in (q, k, v))

    def expected(self, scale):
        """Every sequence by itself, and what the cache must hold."""
        q, k, v = self.prepared()
        parts, first = [], 0
        for s in self.sequences:
            rows = slice(first, first + s.new)
            first += s.new
            places = range(s.earlier)
            old_k, old_v = (
                torch.stack([x[s.table[p // BLOCK], :, p % BLOCK] for p in places])
                if s.earlier
                else x.new_empty(0, self.kv_heads, self.size)
                for x in (self.keys, self.values)
            )
            keys = torch.cat((old_k.double(), k[rows]))
            values = torch.cat((old_v.double(), v[rows]))
            parts.append(naive(q[rows], keys, values, scale, causal(s.new, s.earlier))[0])
        return torch.cat(parts), k, v
