"""The end of a decode step, on the device: see step_update.cu.

Bytes of a row: under 200 of state, 3 for each byte of its token's text.  One thread a row; the
chain of dependent reads, two a byte of text, is its time: some microseconds, bound by latency.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from nightjar.kernels.cuda.checks import ceil_div, check
from nightjar.kernels.cuda.kernel import Kernel
from nightjar.kernels.cuda.launch import launch
from nightjar.kernels.step_state import Column, StepState, StopTables, TokenTexts

THREADS = 128


_KERNEL = Kernel("step_update", "step_update")


def step_update(
    tokens: Tensor, state: StepState, texts: TokenTexts, stops: StopTables, block_size: int
) -> None:
    """Add tokens int64[B] (-1: the row's scores were not finite) to the rows, in place.

    A row ends by a stop string, an end token, its length, or scores that are not finite; then it
    does not change any more.  The rules are those of the engine's GenerateSequence.add and
    StopMatcher.
    """
    batch = tokens.shape[0]
    _check(tokens, state, texts, stops)
    launch(
        _KERNEL,
        (ceil_div(batch, THREADS),),
        (THREADS,),
        tokens,
        state.rows,
        state.history,
        np.int32(state.history.shape[1]),
        state.seen,
        np.int32(state.seen.shape[1]),
        state.counts,
        np.int32(state.counts.shape[1]),
        stops.trans,
        stops.longest,
        texts.data,
        texts.starts,
        state.ends,
        np.int32(state.ends.shape[1]),
        state.block_tables,
        np.int32(state.block_tables.shape[1]),
        np.int32(block_size),
        state.inputs,
        state.attention_lengths,
        state.finished,
        np.int32(batch),
    )


def specialisations() -> Iterator[Kernel]:
    """Yield every instance that the engine uses."""
    yield _KERNEL


def _check(tokens: Tensor, state: StepState, texts: TokenTexts, stops: StopTables) -> None:
    """See check."""
    check("tokens", tokens, torch.int64, (None,))
    batch, vocab_size = tokens.shape[0], state.counts.shape[-1]
    words = ceil_div(vocab_size, 32)
    check("rows", state.rows, torch.int32, (batch, len(Column)), like=tokens)
    check("history", state.history, torch.int32, (batch, None), like=tokens)
    check("seen", state.seen, torch.int32, (batch, words), like=tokens)
    check("counts", state.counts, torch.int32, (batch, vocab_size), like=tokens)
    check("ends", state.ends, torch.int64, (batch, None), like=tokens)
    check("block_tables", state.block_tables, torch.int32, (batch, None), like=tokens)
    check("inputs", state.inputs, torch.int64, (4, batch), like=tokens)
    check("attention_lengths", state.attention_lengths, torch.int32, (batch,), like=tokens)
    check("finished", state.finished, torch.int32, (1,))
    check("texts", texts.data, torch.uint8, (None,), like=tokens)
    check("text starts", texts.starts, torch.int32, (vocab_size + 1,), like=tokens)
    check("trans", stops.trans, torch.uint16, (None, 256), like=tokens)
    check("longest", stops.longest, torch.uint16, (stops.trans.shape[0],), like=tokens)
