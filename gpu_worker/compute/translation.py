"""Translates messages to engine requests, and engine results to messages.

Bad words become token ids; generated token ids become bytes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

from nightjar.checkpoints import Tokenizer
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.engine import (
    GenerateOutput,
    GenerateResult,
    RankResult,
    RequestFailed,
    Result,
)
from nightjar.requests import GenerateRequest, RankRequest


class Translator:
    """Translates with the tokenizer of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def request(self, message: messages.Generate | messages.Rank) -> GenerateRequest | RankRequest:
        """Return the engine's request for a message."""
        match message:
            case messages.Generate():
                return self._generate(message)
            case messages.Rank():
                return message.request

    def _generate(self, message: messages.Generate) -> GenerateRequest:
        if not message.bad_words:
            return message.request
        spelt = tuple(self._spellings(message.bad_words))
        return replace(message.request, sampling=replace(message.request.sampling, bad_words=spelt))

    def answer(self, outcome: Result) -> messages.Answer:
        """Return the message for an engine's result."""
        match outcome:
            case GenerateResult():
                return messages.Generated(
                    ticket=outcome.request_id,
                    outputs=[self._output(output) for output in outcome.outputs],
                    recomputed_in=outcome.recomputed_in,
                    cached_tokens=outcome.cached_tokens,
                )
            case RankResult():
                return messages.Ranked(
                    ticket=outcome.request_id,
                    mean_nll=outcome.mean_nll,
                    token_counts=outcome.token_counts,
                    recomputed_in=outcome.recomputed_in,
                    cached_tokens=outcome.cached_tokens,
                    pruned_tokens=outcome.pruned_tokens,
                )
            case RequestFailed():
                return messages.Failed(
                    ticket=outcome.request_id, code=outcome.code, message=outcome.message
                )

    def _spellings(self, words: Iterable[str]) -> Iterator[tuple[int, ...]]:
        """Yield the token sequences of bad words: at the begin of a line, and after a space."""
        for word in words:
            yield tuple(self._tokenizer.encode(word))
            if not word.startswith(" "):
                yield tuple(self._tokenizer.encode(" " + word))

    def _output(self, output: GenerateOutput) -> messages.Output:
        return messages.Output(
            text=output.text,
            completion_tokens=len(output.token_ids),
            finish_reason=output.finish_reason,
            reports=None if output.logprobs is None else list(self._reports(output)),
        )

    def _reports(self, output: GenerateOutput) -> Iterator[messages.TokenReport]:
        lengths = [len(self._tokenizer.token_bytes[token]) for token in output.token_ids]
        begins = accumulate(lengths, initial=0)
        for token, begin, step in zip(
            output.token_ids, begins, output.logprobs or (), strict=False
        ):
            yield messages.TokenReport(
                token=self._shown(token),
                begin=begin,
                logprob=step.chosen,
                top=[(self._shown(other), value) for other, value in step.top],
            )

    def _shown(self, token: int) -> bytes:
        """Return a token's bytes, a special token's name, or the id if it has no token."""
        known = self._tokenizer.token_bytes[token]
        return known or (self._tokenizer.token(token) or f"token_id:{token}").encode()
