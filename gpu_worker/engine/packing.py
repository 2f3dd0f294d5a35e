"""Packs a plan into the rows of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.engine.adapters import Tuning
from nightjar.gpu_worker.engine.plan import StepPlan
from nightjar.gpu_worker.engine.ranking import RankPart
from nightjar.gpu_worker.models import TokenBatch
from nightjar.kernels import AdaptedRows


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence: tokens from position `start` on, the blocks that take
    their keys and values (none for documents), and how many of the last rows are wanted."""

    tokens: Sequence[int]
    start: int
    tuning: Tuning
    blocks: Sequence[int]
    wanted: int


def pack(plan: StepPlan, vocab_size: int, block_size: int) -> TokenBatch:
    """Pack the plan's rows one after another: chunks of prefixes, running sequences, documents.

    The output rows are, in the same order, the wanted rows of each chunk, and every row of running
    sequences and documents.  The plan must have rows.
    Ids from `vocab_size` on read the prompt vectors of their segment, which are part of the batch.
    """
    chunks = _chunk_segments(plan)
    running = _decode_segments(plan)
    documents = _document_segments(plan)
    segments = [*chunks, *running, *documents]
    lengths = np.array([len(segment.tokens) for segment in segments], dtype=np.int64)
    starts = np.array([segment.start for segment in segments], dtype=np.int64)
    ends = np.cumsum(lengths)
    positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    cached = len(chunks) + len(running)
    written = positions[: ends[cached - 1] if cached else 0]
    blocks = _blocks(segments[:cached], lengths[:cached], written // block_size)
    wanted = np.array([segment.wanted for segment in segments], dtype=np.int64)
    ids = np.fromiter(chain.from_iterable(s.tokens for s in segments), np.int64, ends[-1])
    bases, prompt_vectors = _prompt_vectors(ids >= vocab_size, segments, lengths)
    return TokenBatch(
        token_ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        vector_bases=torch.from_numpy(bases),
        prompt_vectors=prompt_vectors,
        write_blocks=torch.from_numpy(blocks),
        write_offsets=torch.from_numpy(written % block_size),
        prefill=_chunk_layout(chunks, block_size) if chunks else None,
        decode=_paged_layout(running, block_size) if running else None,
        branch=_branch_layout(plan) if documents else None,
        output_rows=torch.from_numpy(_last_rows(ends, wanted)),
        arrivals=plan.arrivals,
        adapted=_adapted_rows(segments, lengths),
    )


def _chunk_segments(plan: StepPlan) -> list[Segment]:
    """Return the parts of prompts and queries."""
    return [
        Segment(
            chunk.prefix.tokens[chunk.start : chunk.end],
            chunk.start,
            chunk.prefix.tuning,
            chunk.prefix.held.blocks,
            chunk.end - chunk.wanted_from,
        )
        for chunk in plan.chunks
    ]


def _decode_segments(plan: StepPlan) -> list[Segment]:
    """Return the newest token of each running sequence."""
    return [
        Segment(
            sequence.generated[-1:],
            sequence.length - 1,
            sequence.job.prefix.tuning,
            sequence.held.blocks,
            1,
        )
        for sequence in plan.decodes
    ]


def _document_segments(plan: StepPlan) -> list[Segment]:
    """Return the fed tokens of every probe that has any."""
    return [
        Segment(
            branch.fed,
            len(branch.part.prefix.tokens),
            branch.part.prefix.tuning,
            (),
            branch.depth - 1,
        )
        for branch in plan.branches
        if branch.depth > 1
    ]


def _prompt_vectors(
    named: np.ndarray, segments: Sequence[Segment], lengths: np.ndarray
) -> tuple[np.ndarray, Tensor | None]:
    """Return the first row of each row's own vectors, int64[T], and the sets that are read.

    named: bool[T], which rows read a prompt vector. Each set comes once, however many read it.
    """
    bases = np.zeros(len(segments), dtype=np.int64)
    begins: dict[int, int] = {}
    tables: list[Tensor] = []
    rows = 0
    for number in np.unique(np.repeat(np.arange(len(segments)), lengths)[named]):
        vectors = segments[number].tuning.vectors
        if vectors is None:
            raise ValueError("an id past the vocabulary, in a request without prompt vectors")
        if id(vectors) not in begins:
            begins[id(vectors)] = rows
            tables.append(vectors.rows)
            rows += vectors.rows.shape[0]
        bases[number] = begins[id(vectors)]
    return np.repeat(bases, lengths), torch.cat(tables) if tables else None


def _adapted_rows(segments: Sequence[Segment], lengths: np.ndarray) -> AdaptedRows | None:
    """Return which rows have which adapter; None where no segment has one."""
    adapters = {id(one): one for s in segments if (one := s.tuning.adapter) is not None}
    if not adapters:
        return None
    numbers = {key: number for number, key in enumerate(adapters)}
    owners = np.array([numbers.get(id(s.tuning.adapter), -1) for s in segments], dtype=np.int64)
    products = tuple(one.products for one in adapters.values())
    return AdaptedRows(products, np.repeat(owners, lengths))


def _last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the last counts[i] rows before each ends[i]: int64[sum of counts]."""
    firsts = ends - counts
    offsets = np.cumsum(counts) - counts
    rows: np.ndarray = np.arange(int(counts.sum())) + np.repeat(firsts - offsets, counts)
    return rows


def _blocks(segments: Sequence[Segment], lengths: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the cache block of every cached row; steps: int64[C], the index in the row's table."""
    if not segments:
        return np.empty(0, dtype=np.int64)
    counts = np.array([len(segment.blocks) for segment in segments], dtype=np.int64)
    flat = np.array(list(chain.from_iterable(s.blocks for s in segments)), dtype=np.int64)
    starts = np.cumsum(counts) - counts
    blocks: np.ndarray = flat[np.repeat(starts, lengths) + steps]
    return blocks


def _chunk_layout(chunks: Sequence[Segment], block_size: int) -> kernels.ChunkLayout:
    """Return the layout of prompts and queries: rows attend to everything up to themselves."""
    parts = [kernels.Chunk(s.blocks, s.start, s.start + len(s.tokens)) for s in chunks]
    return kernels.ChunkLayout.build(parts, block_size)


def _paged_layout(running: Sequence[Segment], block_size: int) -> kernels.PagedLayout:
    """Return the layout of running sequences: rows attend to everything up to themselves."""
    lengths = [segment.start + 1 for segment in running]
    return kernels.PagedLayout.build([segment.blocks for segment in running], lengths, block_size)


def _branch_layout(plan: StepPlan) -> kernels.BranchLayout:
    """Return the layout of documents: rows attend to their prefix and to themselves.

    A document is padded by its full length, however deep this probe is.  So the NLLs of its first
    tokens are the same to the last bit.
    """
    numbers: dict[int, int] = {}
    parts: list[RankPart] = []
    branches = []
    for branch in plan.branches:
        if branch.depth > 1:
            if id(branch.part) not in numbers:
                numbers[id(branch.part)] = len(parts)
                parts.append(branch.part)
            padded = kernels.padded_length(len(branch.document.tokens) - 1)
            number = numbers[id(branch.part)]
            branches.append(kernels.Branch(branch.depth - 1, padded, number))
    prefixes = [part.prefix for part in parts]
    return kernels.BranchLayout.build(
        branches,
        [prefix.held.blocks for prefix in prefixes],
        [len(prefix.tokens) for prefix in prefixes],
    )
