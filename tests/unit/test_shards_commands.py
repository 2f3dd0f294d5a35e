"""What rank 0 sends: a step's batch comes out as it went in, and can be written to."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nightjar.gpu_worker.models import TokenBatch
from nightjar.gpu_worker.models.decode_state import (
    BatchArrays,
    BatchState,
    Seen,
    Shape,
    WindowInput,
)
from nightjar.gpu_worker.models.decode_steps import StepSettings
from nightjar.gpu_worker.shards.commands import (
    Allocate,
    Clear,
    Copy,
    Keep,
    Load,
    Logits,
    TokenNll,
    batch_of,
    decode_command,
    encode,
    forward_of,
    ids_of,
    settings_of,
    steps_of,
    tensor_of,
    window_input_of,
    window_of,
)
from nightjar.kernels import Branch, BranchLayout, Chunk, ChunkLayout, PagedLayout

NUMBERS = (
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20).map(torch.tensor).map(torch.Tensor.long)
)
BLOCKS = st.lists(st.integers(0, 9999), min_size=1, max_size=5)
CHUNKS = st.builds(Chunk, BLOCKS, st.integers(0, 50), st.integers(51, 99))
CHUNK_LAYOUTS = st.lists(CHUNKS, min_size=1, max_size=4).map(lambda c: ChunkLayout.build(c, 32))
PAGED_LAYOUTS = st.lists(st.tuples(BLOCKS, st.integers(1, 99)), min_size=1, max_size=4).map(
    lambda rows: PagedLayout.build(*zip(*rows, strict=True), 16)
)
BRANCHES = st.builds(Branch, st.integers(1, 9), st.integers(9, 16), st.integers(0, 1))
BRANCH_LAYOUTS = st.lists(BRANCHES, min_size=1, max_size=4).map(
    lambda branches: BranchLayout.build(branches, [[4, 5], [6]], [40, 7])
)


def flat(layout: object) -> list[object]:
    """Everything that a layout holds, as lists."""
    if layout is None:
        return []
    values = [getattr(layout, name) for name in layout.__dataclass_fields__ if name != "_plans"]
    return [
        value.tolist()
        if isinstance(value, np.ndarray)
        else flat(value)
        if hasattr(value, "starts")
        else value
        for value in values
    ]


@given(
    ids=NUMBERS,
    rows=NUMBERS,
    prefill=st.none() | CHUNK_LAYOUTS,
    decode=st.none() | PAGED_LAYOUTS,
    branch=st.none() | BRANCH_LAYOUTS,
)
def test_a_batch_comes_out_as_it_went_in(ids, rows, prefill, decode, branch):
    sent = TokenBatch(ids, rows, ids, torch.ones(1, 2), rows, ids, prefill, decode, branch, rows)
    command = decode_command(encode(forward_of(3, sent)))
    assert command.model == 3
    found = batch_of(command, "cpu")
    for name in ("token_ids", "positions", "write_blocks", "write_offsets", "output_rows"):
        assert torch.equal(getattr(found, name), getattr(sent, name))
    for name in ("prefill", "decode", "branch"):
        assert flat(getattr(found, name)) == flat(getattr(sent, name))
    assert torch.equal(found.vector_bases, sent.vector_bases)
    assert command.vectors == 1  # they come by a broadcast
    assert found.prompt_vectors is None
    found.token_ids.add_(1)  # memory of its own


@pytest.mark.parametrize(
    "command",
    [
        Load("bf16"),
        Keep(),
        Allocate(0, 100, 32),
        Clear(1, [3, 4]),
        Copy(0, [(1, 2)]),
        Logits(0, 7),
        TokenNll(0, 2, bytearray(8), bytearray(16)),
    ],
)
def test_commands_cross_the_pipe(command):
    assert decode_command(encode(command)) == command


def test_numbers_that_are_not_int64_are_refused() -> None:
    with pytest.raises(TypeError, match="int32"):
        ids_of(torch.zeros(2, dtype=torch.int32))
    assert tensor_of(ids_of(torch.tensor([5, -1])), "cpu").tolist() == [5, -1]


def test_a_step_that_follows_another_without_the_host_cannot_be_told() -> None:
    rows = torch.zeros(2, dtype=torch.int64)
    batch = TokenBatch(rows, rows, rows, None, rows, rows, None, None, None, output_rows=None)
    with pytest.raises(ValueError, match="on the device only"):
        forward_of(0, batch)


WINDOW = st.builds(
    lambda shape, seen, begins, steps: WindowInput(
        steps,
        np.arange(shape.slots * shape.width, dtype=np.int32).reshape(shape.slots, -1),
        BatchState(shape, BatchArrays.free(shape), seen) if begins else None,
    ),
    st.builds(Shape, *(st.integers(1, 9) for _ in Shape.__annotations__)),
    st.lists(st.builds(Seen, st.integers(0, 8), *(NUMBERS.map(torch.Tensor.numpy),) * 2)),
    st.booleans(),
    st.integers(1, 16),
)


@given(sent=WINDOW)
def test_a_window_comes_out_as_it_went_in(sent):
    command = decode_command(encode(window_of(1, sent)))
    assert command.model == 1
    found = window_input_of(command)
    assert found.steps == sent.steps
    pairs = [(found.tables, sent.tables)]
    if sent.batch is None:
        assert found.batch is None
    else:
        assert found.batch.shape == sent.batch.shape
        pairs += zip(found.batch.arrays, sent.batch.arrays, strict=True)
        for one, other in zip(found.batch.seen, sent.batch.seen, strict=True):
            assert one.slot == other.slot
            pairs += [(one.prompt, other.prompt), (one.generated, other.generated)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_settings_of_windows_cross_the_pipe() -> None:
    sent = StepSettings([b"a", b"", b"\xff"], [2], 16, 32, 8, cuda_graphs=False)
    command = decode_command(encode(steps_of(2, sent)))
    assert command.model == 2
    assert settings_of(command) == sent
