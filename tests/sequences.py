"""Texts as the engine holds them, for tests of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nightjar.gpu_worker.engine import GenerateRequest, SamplingParams
from nightjar.gpu_worker.engine.adapters import Tuning
from nightjar.gpu_worker.engine.requests import FinishReason
from nightjar.gpu_worker.engine.sequence import GenerateJob, GenerateSequence, Prefix
from nightjar.gpu_worker.engine.stopping import StopMatcher


def written_text(
    params: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Iterable[int] = (),
    ends: Mapping[int, FinishReason] | None = None,
    vocab_size: int = 512,
) -> GenerateSequence:
    """A text after `prompt` that holds these tokens so far, without cache blocks."""
    prefix = Prefix(list(prompt), Tuning(), [], len(prompt), 0)
    request = GenerateRequest(0, prefix.tokens, params)
    job = GenerateJob(request, 0, prefix, ends or {}, vocab_size)
    made = GenerateSequence(job, 0, StopMatcher(params.stop), job.make_processors())
    made.generated.extend(generated)
    return made
