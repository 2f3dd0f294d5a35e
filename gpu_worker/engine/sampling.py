"""Chooses the next token of every row of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nightjar import kernels
from nightjar.gpu_worker.engine.beams import BeamState
from nightjar.gpu_worker.engine.logits_processors import process_logits
from nightjar.gpu_worker.engine.requests import TokenLogprobs
from nightjar.gpu_worker.engine.sequence import Choice, GenerateSequence
from nightjar.gpu_worker.models.decode_state import DrawParameters

_MASK_64 = (1 << 64) - 1


def draw_parameters(sequences: Sequence[GenerateSequence], vocab_size: int) -> DrawParameters:
    """Return those of the sequences' requests, in the host's memory."""
    params = [seq.sampling for seq in sequences]
    seeds = np.array([p.seed & _MASK_64 for p in params], dtype=np.uint64).view(np.int64)
    return DrawParameters(
        torch.from_numpy(seeds),
        torch.tensor([seq.sample for seq in sequences], dtype=torch.int64),
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([min(p.top_k, vocab_size) for p in params], dtype=torch.int64),
        torch.tensor([p.top_p for p in params], dtype=torch.float32),
        torch.tensor([p.min_p for p in params], dtype=torch.float32),
    )


def next_tokens(
    logits: Tensor, sequences: Sequence[GenerateSequence], banned: Tensor
) -> list[Choice | None]:
    """Choose a token for each row; None where a row's scores are not finite.

    logits: float32[B, V], changed; banned: int64[n], ids that are never chosen.
    """
    tokens, finite = kernels.argmax(logits)  # before anything is blocked
    reporting = [i for i, seq in enumerate(sequences) if seq.sampling.logprobs is not None]
    searching = [i for i, seq in enumerate(sequences) if seq.sampling.beams is not None]
    reported, searched = (
        logits[rows].log_softmax(-1) if rows else None for rows in (reporting, searching)
    )
    _change(logits, sequences, banned)
    _choose_again(tokens, finite, logits, sequences, banned)
    drawn = [i for i, seq in enumerate(sequences) if seq.sampling.temperature > 0]
    if drawn:
        usable = finite[drawn].unsqueeze(1)
        scores = torch.where(usable, logits[drawn], 0.0)
        tokens[drawn] = _draw(scores, [sequences[i] for i in drawn])
    choices = [Choice(token) for token in tokens.tolist()]
    if reported is not None:
        counts = [sequences[i].sampling.logprobs or 0 for i in reporting]
        found = _logprobs(reported, tokens[reporting], counts)
        for i, logprobs in zip(reporting, found, strict=True):
            choices[i] = replace(choices[i], logprobs=logprobs)
    if searched is not None:
        searched.masked_fill_(logits[searching].isneginf(), float("-inf"))
        most = [_candidates_wanted(sequences[i]) for i in searching]
        for i, best in zip(searching, _best(searched, most), strict=True):
            choices[i] = replace(choices[i], candidates=best)
    return [choice if fine else None for choice, fine in zip(choices, finite.tolist(), strict=True)]


def _change(logits: Tensor, sequences: Sequence[GenerateSequence], banned: Tensor) -> None:
    """Block the banned tokens, and make the changes that requests ask for."""
    if banned.numel():
        logits.index_fill_(1, banned, float("-inf"))
    changing = {
        row: (seq.processors, seq.generated)
        for row, seq in enumerate(sequences)
        if seq.processors is not None
    }
    if changing:
        process_logits(logits, changing)


def _choose_again(
    tokens: Tensor,
    finite: Tensor,
    logits: Tensor,
    sequences: Sequence[GenerateSequence],
    banned: Tensor,
) -> None:
    """Find the best token again where `_change` may have changed it."""
    blocked = torch.isin(tokens, banned).tolist()
    rows = [row for row, seq in enumerate(sequences) if blocked[row] or seq.processors is not None]
    if rows:
        best, _ = kernels.argmax(logits[rows])
        tokens[rows] = best
        # A row in which everything is blocked has no best token.
        finite[rows] &= logits[rows, best].isfinite()


def _draw(logits: Tensor, sequences: Sequence[GenerateSequence]) -> Tensor:
    """Draw sampled rows; a draw depends only on the request's seed, the sample and the step."""
    steps = kernels.upload(torch.tensor([len(seq.generated) for seq in sequences]), logits.device)
    return draw_parameters(sequences, logits.shape[1]).to(logits.device).draw(logits, steps)


def _logprobs(log_probs: Tensor, tokens: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities to report: float32[R, V], int64[R], tokens to report of each."""
    chosen = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
    return [
        TokenLogprobs(value, best)
        for value, best in zip(chosen, _best(log_probs, counts), strict=True)
    ]


def _candidates_wanted(sequence: GenerateSequence) -> int:
    """Return how many of a beam's best tokens its search needs."""
    search = sequence.sampling.beams
    return 0 if search is None else BeamState.candidates_per_beam(search, len(sequence.ends))


def _best(log_probs: Tensor, counts: list[int]) -> list[tuple[tuple[int, float], ...]]:
    """Return the best (token, log-probability) of each row, at most counts[i], none at -inf."""
    most = max(counts)
    if not most:
        return [()] * len(counts)
    values, ids = (found.tolist() for found in kernels.top_log_probs(log_probs, most))
    return [
        tuple(
            (token, value)
            for token, value in zip(ids[i][:count], values[i][:count], strict=True)
            if value != -math.inf
        )
        for i, count in enumerate(counts)
    ]
