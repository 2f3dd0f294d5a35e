"""The compute process's loop over a real pipe: what cannot be translated fails alone."""

import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.compute.fake_engine import FakeEngine
from nightjar.gpu_worker.compute.loop import ComputeLoop
from nightjar.gpu_worker.compute.translation import Translator
from nightjar.gpu_worker.engine import Result
from nightjar.gpu_worker.shards.activity import Activity
from nightjar.jobs.vector_records import Kind
from nightjar.requests import GenerateRequest, SamplingParams

PATIENCE_S = 30


class BrokenTranslator(Translator):
    """Meets a word that its tokenizer cannot take, and an answer that it cannot read."""

    def request(self, message: messages.Generate | messages.Rank) -> Any:
        if message.ticket == 2:
            raise UnicodeError("the tokenizer panicked")
        return super().request(message)

    def answer(self, outcome: Result) -> messages.Answer:
        if outcome.request_id == 3:
            raise IndexError("no such token")
        return super().answer(outcome)


@pytest.fixture
def pipe(tiny_model: Path) -> Iterator[Connection]:
    """Our end of the pipe to a loop that runs in a thread."""
    tokenizer = ModelDirectory.open(tiny_model).tokenizer()
    ours, theirs = Pipe()
    engine = FakeEngine(tokenizer.token_bytes)
    loop = ComputeLoop(engine, BrokenTranslator(tokenizer), theirs, Activity())
    running = threading.Thread(target=loop.run)
    running.start()
    yield ours
    ours.close()
    running.join(PATIENCE_S)
    theirs.close()


def ask(pipe: Connection, *tickets: int) -> dict[int, messages.Answer]:
    sampling = SamplingParams(max_tokens=3)
    asked = [GenerateRequest(ticket, [5, 6], sampling) for ticket in tickets]
    frame = [messages.Generate(request) for request in asked]
    pipe.send_bytes(messages.encode(frame))
    return received(pipe, len(tickets))


def received(pipe: Connection, count: int) -> dict[int, messages.Answer]:
    answers: dict[int, messages.Answer] = {}
    while len(answers) < count:
        assert pipe.poll(PATIENCE_S)
        for message in messages.decode_from_compute(pipe.recv_bytes()):
            if isinstance(message, messages.Generated | messages.Ranked | messages.Failed):
                answers[message.ticket] = message
    return answers


def test_what_raises_in_the_translation_fails_alone(pipe: Connection) -> None:
    answers = ask(pipe, 1, 2, 3, 4)
    assert isinstance(answers[1], messages.Generated)
    assert isinstance(answers[4], messages.Generated)
    failures = [answers[2], answers[3]]
    assert all(isinstance(failed, messages.Failed) for failed in failures)
    assert [(failed.code, failed.message) for failed in failures] == [  # type: ignore[union-attr]
        ("internal_error", "UnicodeError: the tokenizer panicked"),
        ("internal_error", "IndexError: no such token"),
    ]


def test_what_is_registered_is_told_by_its_kind(pipe: Connection) -> None:
    """An adapter and prompt vectors, each a file of one tensor, under one key."""
    data = save({"one": np.ones((2, 3), np.float32)})
    sampling = SamplingParams(max_tokens=3)
    requests = [
        GenerateRequest(5, [5, 6], sampling, prompt_vectors="x@1"),
        GenerateRequest(6, [5, 6], sampling, adapter="x@1"),
    ]
    kinds: list[tuple[Kind, int]] = [("lora", 6), ("vectors", 5)]
    for kind, served in kinds:
        register = messages.RegisterVectors("x@1", data, kind)
        frame = [messages.ForgetVectors("x@1"), register, *map(messages.Generate, requests)]
        pipe.send_bytes(messages.encode(frame))
        answers = received(pipe, 2)
        assert isinstance(answers[served], messages.Generated)
        refused = answers[11 - served]
        assert isinstance(refused, messages.Failed)
        assert "not registered" in refused.message


def test_a_request_that_cannot_be_translated_is_answered_while_nothing_else_runs(
    pipe: Connection,
) -> None:
    assert isinstance(ask(pipe, 2)[2], messages.Failed)
    assert isinstance(ask(pipe, 1)[1], messages.Generated)
