"""Sequences that continue one another: how they share cache blocks, and what must be copied."""

from __future__ import annotations

from collections.abc import Sequence

from nightjar.gpu_worker.engine.beam_search import Child
from nightjar.gpu_worker.engine.kv_cache import BlockPool, BlockTable
from nightjar.gpu_worker.engine.sequence import GenerateJob, GenerateSequence


class Forks:
    """Gives sequences their blocks.  Whole blocks are shared; a fork's last block is a copy."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        # By copy: a sequence that ends with its first token leaves a copy that no sequence needs.
        # Another sequence may fork into the same block before that copy is made.
        self._copies: dict[int, int] = {}

    def start(self, sequence: GenerateSequence) -> None:
        """Give a sequence that got its first token its own blocks, after its prompt's."""
        job = sequence.job
        prompt = job.prefix.held
        if job.request.sampling.n > 1 and job.beams is None:
            sequence.table = self._fork(prompt, len(job.prefix.tokens), job, prompt)
            return
        sequence.table, job.prefix.table = prompt, None
        if job.beams is not None:
            own = self._pool.blocks_for(job.max_length)
            job.spare = prompt.split(job.prefix.max_blocks - own)

    def replace(self, job: GenerateJob, children: Sequence[Child]) -> None:
        """Give the children of a search's sequences their blocks.

        The first child of a sequence takes over its blocks, and others fork from them.  The blocks
        of a sequence without children pay for the forks.
        """
        spare = job.spare
        if spare is None:
            raise RuntimeError(f"request {job.request_id} searches before it has started")
        parents = {id(parent) for parent, _ in children}
        for sequence in job.running:
            if id(sequence) not in parents:
                spare.merge(sequence.held)
        taken: set[int] = set()
        for parent, child in children:
            if id(parent) in taken:
                child.table = self._fork(parent.held, child.length - 1, job, spare)
            else:
                taken.add(id(parent))
                child.table = parent.held

    def take_copies(self) -> dict[int, int]:
        """Return the source of each block to copy; all are copied before the next forward pass."""
        copies, self._copies = self._copies, {}
        return copies

    def _fork(
        self, table: BlockTable, tokens: int, job: GenerateJob, payer: BlockTable
    ) -> BlockTable:
        """Return blocks for a sequence that begins with the first `tokens` positions of a table."""
        own = self._pool.blocks_for(job.max_length) - tokens // self._pool.block_size
        fork, copied = table.fork(tokens, own, payer)
        if copied is not None:
            source, copy = copied
            self._copies[copy] = source
        return fork
