"""A layer's attention as a whole: heads prepared, cache written, rows of every kind in one result;
against a float64 oracle, by the torch reference and by the compiled kernels."""

from dataclasses import replace

import pytest
import torch

from nightjar.kernels import (
    native,
)
from tests.backends import BACKENDS, use_backend
from tests.cpu_steps import BLOCK, KINDS, Step

SHAPES = [(4, 4, 16), (6, 2, 64), (2, 1, 80), (3, 3, 12)]


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


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
