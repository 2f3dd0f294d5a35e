"""The plan of one step, and its results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from nightjar.gpu_worker.engine.ranking import Branch, RankJob, RankPart
from nightjar.gpu_worker.engine.sequence import Choice, GenerateJob, GenerateSequence, Prefix
from nightjar.gpu_worker.models import Arrivals

Job = GenerateJob | RankJob
"""An admitted request."""


@dataclass(frozen=True, slots=True)
class PrefixChunk:
    """Positions [start, end) of a prefix."""

    prefix: Prefix
    start: int
    end: int

    @property
    def finishes(self) -> bool:
        """Whether the prefix is complete after this part."""
        return self.end == len(self.prefix.tokens)

    @property
    def wanted_from(self) -> int:
        """The first position whose last hidden state is wanted; `end` for none.

        Wanted are positions that predict a scored token, and the last one of the prefix.
        """
        return min(self.end, max(self.start, self.prefix.scored_from - 1))


@dataclass(slots=True)
class PromptWork:
    """A part of a prompt, and the samples that get their first token in this step."""

    job: GenerateJob
    chunk: PrefixChunk | None
    starts: list[GenerateSequence]


@dataclass(slots=True)
class RankWork:
    """Parts of the prefixes of a ranking, and probes of its documents."""

    job: RankJob
    chunks: list[tuple[RankPart, PrefixChunk]]
    branches: list[Branch]


@dataclass(slots=True)
class StepPlan:
    """What one step computes: prompts, running sequences, rankings; and the loads it waits for."""

    prompts: list[PromptWork] = field(default_factory=list)
    decodes: list[GenerateSequence] = field(default_factory=list)
    ranks: list[RankWork] = field(default_factory=list)
    arrivals: Arrivals | None = None

    def __bool__(self) -> bool:
        return bool(self.prompts or self.decodes or self.ranks)

    @property
    def chunks(self) -> Iterator[PrefixChunk]:
        """Yield every part of a prefix, in packed order."""
        for prompt in self.prompts:
            if prompt.chunk is not None:
                yield prompt.chunk
        for rank in self.ranks:
            for _, chunk in rank.chunks:
                yield chunk

    @property
    def branches(self) -> list[Branch]:
        """Yield every probe of a document, in packed order."""
        return [branch for rank in self.ranks for branch in rank.branches]

    @property
    def has_joined(self) -> bool:
        """Whether rows of prompts or rankings join those of the running sequences."""
        return any(self.chunks) or any(rank.branches for rank in self.ranks)

    @property
    def content(self) -> str:
        """What the plan computes: prefill, decode, rank, or mixed."""
        parts = (self.prompts, "prefill"), (self.decodes, "decode"), (self.ranks, "rank")
        found = [name for part, name in parts if part]
        return found[0] if len(found) == 1 else "mixed"

    @property
    def sampled(self) -> list[GenerateSequence]:
        """Return every sequence that gets a token: new ones, then running ones."""
        return [sequence for prompt in self.prompts for sequence in prompt.starts] + self.decodes

    def singles(self) -> Iterator[tuple[Job, StepPlan]]:
        """Yield a plan for each request of this plan."""
        for prompt in self.prompts:
            yield prompt.job, StepPlan(prompts=[prompt], arrivals=self.arrivals)
        for sequence in self.decodes:
            yield sequence.job, StepPlan(decodes=[sequence], arrivals=self.arrivals)
        for rank in self.ranks:
            yield rank.job, StepPlan(ranks=[rank], arrivals=self.arrivals)


@dataclass(slots=True)
class StepOutput:
    """The results of one step.

    tokens: each sequence with its next token, None where the row's scores were not finite.
    hidden: completed prefixes, with their last hidden state [H].
    shared: per chunk of a part, float64 NLLs of the prefix tokens it scored.
    probes: each probe with float64 NLLs of the document's scored tokens.
    failures: requests whose computation raised.
    """

    tokens: list[tuple[GenerateSequence, Choice | None]] = field(default_factory=list)
    hidden: list[tuple[Prefix, Tensor]] = field(default_factory=list)
    shared: list[tuple[RankPart, np.ndarray]] = field(default_factory=list)
    probes: list[tuple[Branch, np.ndarray]] = field(default_factory=list)
    done: list[PromptWork | RankWork] = field(default_factory=list)
    failures: list[tuple[Job, Exception]] = field(default_factory=list)

    @property
    def not_finite(self) -> list[Job]:
        """Return the requests with a score that is NaN or infinite."""
        sequences = [sequence.job for sequence, choice in self.tokens if choice is None]
        rankings = [job for job in self.rankings if not job.is_finite]
        return [*dict.fromkeys(sequences), *rankings]

    @property
    def rankings(self) -> list[RankJob]:
        """Rankings whose documents were probed."""
        return list(dict.fromkeys(branch.job for branch, _ in self.probes))

    def record(self) -> None:
        """Store the results in their prefixes and documents."""
        for prefix, hidden in self.hidden:
            prefix.last_hidden = hidden
        for part, nll in self.shared:
            part.shared_nll.append(nll)
        for branch, nll in self.probes:
            branch.job.add(branch, nll)

    def extend(self, other: StepOutput) -> None:
        """Add the results of another part of the same step."""
        self.tokens.extend(other.tokens)
        self.hidden.extend(other.hidden)
        self.shared.extend(other.shared)
        self.probes.extend(other.probes)
        self.done.extend(other.done)
