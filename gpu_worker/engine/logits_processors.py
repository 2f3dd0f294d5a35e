"""The changes that a request makes to the scores, kept up to date token by token.

A sequence whose request changes nothing has no processors.  The state follows the sequence's own
`generated`, so a repeated step changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from nightjar import kernels
from nightjar.requests import SamplingParams


class TokenCounts:
    """How often each seen token was generated.

    ids: int64[n], in order of first sight, the prompt's with count 0 until they are generated;
    counts: float32[n].
    """

    def __init__(self, prompt: Iterable[int], most: int) -> None:
        """most: how many tokens can be generated."""
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        size = len(self._slots)
        self._ids = np.empty(size + most, dtype=np.int64)
        self._ids[:size] = list(self._slots)
        self._counts = np.zeros(size + most, dtype=np.float32)
        self._read = 0

    def read(self, generated: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Count what was generated since the last call; returns ids and counts."""
        for token in generated[self._read :]:
            slot = self._slots.setdefault(token, len(self._slots))
            self._ids[slot] = token
            self._counts[slot] += 1
        self._read = len(generated)
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]


class BadWords:
    """Token sequences that must not be generated; finds the tokens that would complete one now."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._always: set[int] = set()
        self._after: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            *beginning, last = word
            if beginning:
                self._after.setdefault(beginning[-1], []).append((beginning, last))
            else:
                self._always.add(last)

    def completing(self, generated: list[int]) -> set[int]:
        """Return the blocked tokens after `generated`.  The prompt is no part of a bad word."""
        if not generated or generated[-1] not in self._after:
            return self._always
        return self._always.union(
            last
            for beginning, last in self._after[generated[-1]]
            if generated[-len(beginning) :] == beginning
        )


class LogitsProcessors:
    """The changes that one request makes.

    penalties: repetition, presence, frequency; counts: the tokens they are for, None where all
    three are off.  bias: ids int64[n] and what is added float32[n].  top_a: the share and the
    temperature; None where it is off, as it is at temperature 0.
    """

    def __init__(
        self, params: SamplingParams, prompt: Iterable[int], ends: Iterable[int], vocab_size: int
    ) -> None:
        """ends: tokens that end the sequence, blocked before min_tokens."""
        repetition = params.repetition_penalty
        self.penalties = (repetition, params.presence_penalty, params.frequency_penalty)
        self.counts: TokenCounts | None = None
        if self.penalties != (1, 0, 0):
            # Ids past the vocabulary are prompt vectors: they have no score.
            known = (token for token in prompt if token < vocab_size)
            self.counts = TokenCounts(known if repetition != 1 else (), params.max_tokens)
        self.bias = (
            np.fromiter(params.logit_bias.keys(), np.int64),
            np.fromiter(params.logit_bias.values(), np.float32),
        )
        self.top_a = (params.top_a, params.temperature) if _filters(params) else None
        self._bad_words = BadWords(params.bad_words)
        self._min_tokens = params.min_tokens
        self._ends = frozenset(ends)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether the parameters change any score."""
        return bool(
            params.repetition_penalty != 1
            or params.presence_penalty
            or params.frequency_penalty
            or params.logit_bias
            or params.bad_words
            or params.min_tokens
            or _filters(params)
        )

    @staticmethod
    def need_host(params: SamplingParams) -> bool:
        """Whether the parameters change scores in a way that windows of steps on a GPU cannot."""
        return bool(params.logit_bias or params.bad_words or _filters(params))

    def blocked(self, generated: list[int]) -> set[int]:
        """Return the tokens that cannot be chosen after `generated`."""
        blocked = self._bad_words.completing(generated)
        return blocked | self._ends if len(generated) < self._min_tokens else blocked


def process_logits(logits: Tensor, rows: Mapping[int, tuple[LogitsProcessors, list[int]]]) -> None:
    """Change the rows: blocked tokens, bias, penalties, in vLLM's order; then top_a.

    logits: float32[B, V], changed; rows: each row's processors and the tokens generated so far.
    """
    blocked = {
        row: np.fromiter(tokens, np.int64, len(tokens))
        for row, (processors, generated) in rows.items()
        if (tokens := processors.blocked(generated))
    }
    if blocked:
        kernels.block_tokens(logits, *_positions(blocked, logits.device))
    biased = {row: processors.bias for row, (processors, _) in rows.items()}
    values = np.concatenate([values for _, values in biased.values()])
    if len(values):
        positions = _positions({row: ids for row, (ids, _) in biased.items()}, logits.device)
        kernels.bias_tokens(
            logits, *positions, kernels.upload(torch.from_numpy(values), logits.device)
        )
    _penalize(logits, rows)
    _keep_top_a(logits, rows)


def _filters(params: SamplingParams) -> bool:
    """Whether top_a removes tokens; a greedy choice is always the most probable token."""
    return params.top_a > 0 and params.temperature > 0


def _keep_top_a(logits: Tensor, rows: Mapping[int, tuple[LogitsProcessors, list[int]]]) -> None:
    """Block tokens (-inf) whose probability is below top_a times the square of the largest one.

    The definition of the parameter of that name in Aphrodite Engine and of KoboldAI's Top-a.  The
    probabilities are those after the temperature and before top_k, top_p and min_p.  The most
    probable token always stays, because top_a is at most 1.
    """
    filtered = {row: one.top_a for row, (one, _) in rows.items() if one.top_a is not None}
    if not filtered:
        return
    chosen = kernels.upload(torch.tensor(list(filtered)), logits.device)
    given = torch.tensor(list(filtered.values()), dtype=torch.float32)
    share, temperature = kernels.upload(given, logits.device).unsqueeze(2).unbind(1)
    scores = logits[chosen]
    # Relative to the best score, so that a temperature near 0 gives no NaN.
    falling = scores - scores.amax(-1, keepdim=True)
    weights = (falling / temperature.clamp(min=1e-30)).softmax(-1)
    limits = share * weights.amax(-1, keepdim=True).square()
    logits[chosen] = scores.masked_fill(weights < limits, float("-inf"))


def _penalize(logits: Tensor, rows: Mapping[int, tuple[LogitsProcessors, list[int]]]) -> None:
    """Apply the penalties of all rows in one call, to the tokens that each has seen."""
    ids, counts, penalties = {}, [], []
    for row, (processors, generated) in rows.items():
        if processors.counts is not None:
            ids[row], count = processors.counts.read(generated)
            counts.append(count)
            penalties.append(np.repeat([processors.penalties], len(count), axis=0))
    if ids:
        of_positions = torch.from_numpy(np.concatenate(penalties).astype(np.float32))
        kernels.penalize_tokens(
            logits,
            *_positions(ids, logits.device),
            kernels.upload(torch.from_numpy(np.concatenate(counts)), logits.device),
            *kernels.upload(of_positions, logits.device).unbind(1),
        )


def _positions(ids: Mapping[int, np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids of each row as pairs: rows int64[M], ids int64[M]."""
    rows = np.repeat(list(ids), [len(row) for row in ids.values()])
    columns = np.concatenate(list(ids.values()))
    first, second = (kernels.upload(torch.from_numpy(x), device) for x in (rows, columns))
    return first, second
