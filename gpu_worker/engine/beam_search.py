"""One step of a beam search: from the beams' best tokens to the sequences that continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nightjar.gpu_worker.engine.beams import BeamState
from nightjar.gpu_worker.engine.requests import GenerateOutput
from nightjar.gpu_worker.engine.sequence import Choice, GenerateSequence

Child = tuple[GenerateSequence, GenerateSequence]
"""A running sequence, and one that continues it by one token."""


def search_step(
    state: BeamState[GenerateOutput],
    beams: Sequence[tuple[GenerateSequence, Choice]],
    token_bytes: Sequence[bytes],
) -> list[Child]:
    """Finish the sequences that end here and return those that continue; none at the search's end.

    beams: the running sequences, in the order of the last step's result, each with its best tokens.
    """
    going = []
    children: dict[int, Child] = {}
    width = beams[0][0].job.request.sampling.width
    candidates = state.candidates([choice.candidates for _, choice in beams])
    for rank, candidate in enumerate(candidates):
        parent, choice = beams[candidate.parent]
        child = parent.branch()
        if choice.logprobs is not None:
            chosen = dict(choice.candidates)[candidate.token]
            child.logprobs.append(replace(choice.logprobs, chosen=chosen))
        ending = child.add(candidate.token, token_bytes[candidate.token])
        if ending is None:
            going.append(candidate)
            children[id(candidate)] = parent, child
            if len(going) == width:
                break
        elif state.may_finish(rank):
            output = replace(child.output(ending), cumulative_logprob=candidate.total)
            state.finish(output, candidate.total)
    kept = state.keep(going)
    return [] if state.done else [children[id(candidate)] for candidate in kept]
