"""From a plan to the packed rows of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from nightjar.gpu_worker.engine.ranking import fed_tokens
from nightjar.gpu_worker.engine.sequence import GenerateSequence, RankSequence, StepPlan
from nightjar.gpu_worker.models import TokenBatch
from nightjar.kernels import BranchLayout, PagedLayout, RaggedLayout


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence: tokens from position `start` on, and the blocks that
    take their keys and values (none for documents)."""

    tokens: Sequence[int]
    start: int
    vector_base: int
    blocks: Sequence[int] = ()


def pack(plan: StepPlan, prompt_vectors: Tensor | None, block_size: int) -> TokenBatch:
    """Lay the plan's rows one after another: prompts, queries, running texts, documents.

    The output rows are, in the same order, the last row of each prompt and query, and every row
    of running texts and documents.
    """
    whole = _whole_segments(plan)
    running = [_decode_segment(sequence) for sequence in plan.decodes]
    documents = _document_segments(plan)
    segments = [*whole, *running, *documents]
    lengths = np.array([len(segment.tokens) for segment in segments], dtype=np.int64)
    positions = _positions(segments, lengths)
    ends = np.cumsum(lengths)
    whole_rows = int(ends[len(whole) - 1]) if whole else 0
    cached_rows = whole_rows + len(running)
    outputs = np.concatenate([ends[: len(whole)] - 1, np.arange(whole_rows, ends[-1])])
    written = positions[:cached_rows]
    blocks = _blocks(segments[: len(whole) + len(running)], lengths, written // block_size)
    bases = np.repeat([segment.vector_base for segment in segments], lengths)
    return TokenBatch(
        token_ids=torch.tensor(list(chain.from_iterable(s.tokens for s in segments))),
        positions=torch.from_numpy(positions),
        vector_bases=torch.from_numpy(bases),
        prompt_vectors=prompt_vectors,
        write_blocks=torch.from_numpy(blocks),
        write_offsets=torch.from_numpy(written % block_size),
        prefill=RaggedLayout.build([len(s.tokens) for s in whole]) if whole else None,
        decode=_paged_layout(running, block_size) if running else None,
        branch=_branch_layout(plan) if documents else None,
        output_rows=torch.from_numpy(outputs),
    )


def _whole_segments(plan: StepPlan) -> list[Segment]:
    """Prompts, then the queries that are not cached yet."""
    prompts = [
        Segment(sequence.prompt, 0, sequence.vector_base, _held_blocks(sequence))
        for sequence in plan.prefills
    ]
    rankings = (piece.sequence for piece in plan.ranks if piece.runs_query)
    queries = [
        Segment(ranking.query, 0, ranking.vector_base, _held_blocks(ranking))
        for ranking in rankings
    ]
    return prompts + queries


def _decode_segment(sequence: GenerateSequence) -> Segment:
    """The newest token of a running text."""
    blocks = _held_blocks(sequence)
    return Segment(sequence.generated[-1:], sequence.length - 1, sequence.vector_base, blocks)


def _document_segments(plan: StepPlan) -> list[Segment]:
    """The fed tokens of every document of more than one token."""
    return [
        Segment(fed_tokens(document), len(piece.sequence.query), piece.sequence.vector_base)
        for piece in plan.ranks
        for document in piece.documents
        if len(document) > 1
    ]


def _held_blocks(sequence: GenerateSequence | RankSequence) -> list[int]:
    """The blocks of a scheduled sequence."""
    if sequence.table is None:
        raise RuntimeError(f"request {sequence.request_id} was planned without cache blocks")
    return sequence.table.blocks


def _positions(segments: Sequence[Segment], lengths: np.ndarray) -> np.ndarray:
    """The position of every row: int64[T]."""
    starts = np.array([segment.start for segment in segments], dtype=np.int64)
    first_rows = np.cumsum(lengths) - lengths
    rows = np.arange(lengths.sum(), dtype=np.int64)
    positions: np.ndarray = rows + np.repeat(starts - first_rows, lengths)
    return positions


def _blocks(segments: Sequence[Segment], lengths: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The cache block of every cached row; steps: int64[C], the index in the row's table."""
    if not segments:
        return np.empty(0, dtype=np.int64)
    counts = np.array([len(segment.blocks) for segment in segments], dtype=np.int64)
    flat = np.array(list(chain.from_iterable(s.blocks for s in segments)), dtype=np.int64)
    starts = np.cumsum(counts) - counts
    blocks: np.ndarray = flat[np.repeat(starts, lengths[: len(segments)]) + steps]
    return blocks


def _paged_layout(running: Sequence[Segment], block_size: int) -> PagedLayout:
    """Where the running texts' rows attend: everything up to themselves."""
    lengths = [segment.start + 1 for segment in running]
    return PagedLayout.build([segment.blocks for segment in running], lengths, block_size)


def _branch_layout(plan: StepPlan) -> BranchLayout:
    """Where the documents' rows attend: their query, and themselves."""
    pairs = [
        (len(document) - 1, owner)
        for owner, piece in enumerate(plan.ranks)
        for document in piece.documents
        if len(document) > 1
    ]
    return BranchLayout.build(
        [length for length, _ in pairs],
        [owner for _, owner in pairs],
        [_held_blocks(piece.sequence) for piece in plan.ranks],
        [len(piece.sequence.query) for piece in plan.ranks],
    )
