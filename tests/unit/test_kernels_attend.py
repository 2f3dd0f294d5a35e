"""A layer's attention as a whole: heads prepared, cache written, rows of every kind in one result;
against a float64 oracle, by the torch reference and by the compiled kernels."""

from dataclasses import dataclass, replace

import pytest
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
    native,
    padded_length,
)
from tests.backends import BACKENDS, use_backend
from tests.unit.test_kernels_attention import causal, naive

BLOCK = 32
CONTEXT = 128
SHAPES = [(4, 4, 16), (6, 2, 64), (2, 1, 80), (3, 3, 12)]
KINDS = [("prompt",), ("running",), ("document",), ("prompt", "running", "document")]


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


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
    """Some of SEQUENCES in one step, over a cache in which what nobody wrote is zeros."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_every_kind_of_row_attends_as_alone(kinds, shape, dtype):
    scale = shape[2] ** -0.5
    step = Step(kinds, shape, dtype=dtype, pairs=shape[2] // 2)
    out, write = step.run(scale)
    expected, k, v = step.expected(scale)
    # A unit in the last place of what is kept in half precision.
    near = 1e-5 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(out.double(), expected, atol=near, rtol=near)
    cached = write.blocks.shape[0]
    for stored, wanted in ((write.keys, k), (write.values, v)):
        found = stored[write.blocks, :, write.offsets].double()
        torch.testing.assert_close(found, wanted[:cached], atol=near, rtol=near)


@pytest.mark.parametrize(("normed", "pairs"), [(False, 0), (True, 0), (False, 3), (True, 5)])
def test_norms_and_rotation_each_by_itself(normed, pairs):
    step = Step(KINDS[-1], (4, 2, 16), normed=normed, pairs=pairs)
    out, _ = step.run(0.25)
    torch.testing.assert_close(out.double(), step.expected(0.25)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_kinds_of_rows_change_no_bit(dtype):
    together = Step(KINDS[-1], (6, 2, 64), dtype=dtype, pairs=32)
    out, write = together.run(0.125)
    first = 0
    for kind in KINDS[-1]:
        step = Step((kind,), (6, 2, 64), dtype=dtype, pairs=32)
        alone, own = step.run(0.125)
        assert torch.equal(out[first : first + alone.shape[0]], alone)
        places = own.blocks, slice(None), own.offsets
        assert torch.equal(write.keys[places], own.keys[places])
        first += alone.shape[0]
    assert first == out.shape[0]


@pytest.mark.parametrize(
    "prompts",
    [[], [0], [32], [37], [0, 1, 2, 31, 32, 33], [31, 33, 36], list(range(38))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_are_wanted_are_the_same_to_the_bit(prompts, dtype):
    """Of 38 prompt rows, 33 of one sequence and 5 of another; all others are always wanted."""
    step = Step(KINDS[-1], (6, 2, 64), dtype=dtype, pairs=32)
    whole, cached = step.run(0.125)
    wanted = torch.tensor([*prompts, *range(38, whole.shape[0])])
    found, write = step.run(0.125, wanted)
    assert torch.equal(found[wanted], whole[wanted])
    assert torch.equal(write.keys, cached.keys)
    assert torch.equal(write.values, cached.values)


@pytest.mark.parametrize("backend", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["prompt", "document"])
@pytest.mark.parametrize("place", [0, 3, 4])
def test_a_value_that_is_not_finite_is_seen_by_those_after_it_alone(backend, kind, place, dtype):
    """Rows share tiles, in which a key that is hidden from one weighs nothing for it; nothing times
    infinity would be no number."""
    assert backend == "native"
    step = Step(KINDS[-1], (6, 2, 64), dtype=dtype, pairs=32)
    expected, _ = step.run(0.125)
    starts = {"prompt": 33, "document": 40}
    first, length = starts[kind], 5
    step.qkv[first + place, 8:] = torch.inf  # its values
    found, _ = step.run(0.125)
    sees = torch.zeros(found.shape[0], dtype=torch.bool)
    sees[first + place : first + length] = True
    assert not found[sees].isfinite().any()
    assert torch.equal(found[~sees], expected[~sees])


def test_only_its_rows_are_written():
    step = Step(KINDS[-1], (4, 4, 16), pairs=8)
    _, write = step.run(0.25)
    for before, after in ((step.keys, write.keys), (step.values, write.values)):
        untouched = torch.ones(9, BLOCK, dtype=torch.bool)
        untouched[write.blocks, write.offsets] = False
        assert torch.equal(before.transpose(1, 2)[untouched], after.transpose(1, 2)[untouched])


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_what_the_kernels_cannot_read_is_refused(backend):
    assert backend == "native"
    step = Step(("prompt",), (4, 4, 16), pairs=8)
    halves = replace(step.rotation, cosines=step.rotation.cosines.half())
    with pytest.raises(ValueError, match="contiguous float32"):
        native.attention.attend(step.qkv, None, halves, step.write(), step.rows(), 1.0)
    wide = torch.cat((step.qkv, step.qkv), dim=1)[:, : step.qkv.shape[1]]
    with pytest.raises(ValueError, match="contiguous"):
        native.attention.attend(wide, None, None, step.write(), step.rows(), 1.0)
    short = replace(step.norms, key=step.norms.key[:8])
    with pytest.raises(ValueError, match="norms of 16 and 8 for heads of 16"):
        native.attention.attend(step.qkv, short, None, step.write(), step.rows(), 1.0)
