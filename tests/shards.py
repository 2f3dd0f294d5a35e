"""Ranks of one model for tests, in threads of this process or in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.engine import (
    BeamSearch,
    Engine,
    EngineConfig,
    GenerateResult,
    RankRequest,
    RankResult,
    Request,
    Result,
)
from nightjar.gpu_worker.models import Decoder
from nightjar.gpu_worker.shards.activity import Activity
from nightjar.gpu_worker.shards.collective import TorchCollective
from nightjar.gpu_worker.shards.follower import Follower
from nightjar.gpu_worker.shards.process import GroupMember
from nightjar.gpu_worker.shards.rank_zero import RankZero
from nightjar.gpu_worker.shards.startup import StartUp, encode
from tests.engines import drain, generate, random_ids

PATIENCE_S = 60


class Meeting:
    """Where the threads of one model exchange tensors."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks)
        self._brought: list[Tensor] = [torch.empty(0)] * ranks

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """What every rank brings, in the order of the ranks."""
        self._brought[rank] = x.clone()
        self._barrier.wait(PATIENCE_S)
        found = list(self._brought)
        self._barrier.wait(PATIENCE_S)
        return found


class ThreadCollective:
    """A Collective between threads."""

    is_recordable = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank

    def sum(self, x: Tensor) -> Tensor:
        parts = self._meeting.exchange(self.rank, x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, x))

    def broadcast(self, x: Tensor) -> Tensor:
        return self._meeting.exchange(self.rank, x)[0]


@contextmanager
def thread_ranks(directory: ModelDirectory, ranks: int, device: str = "cpu") -> Iterator[RankZero]:
    """Rank 0 of a model, whose other ranks follow in threads, all on one device; kernels run where
    they do here."""
    meeting = Meeting(ranks)
    pipes = [Pipe() for _ in range(ranks - 1)]
    followers = [
        Follower(
            directory.path,
            GroupMember(rank, ranks, None, PATIENCE_S, Activity()),
            device,
            theirs,
            partial(ThreadCollective, meeting, rank),
        )
        for rank, (_, theirs) in enumerate(pipes, 1)
    ]
    threads = [
        threading.Thread(target=copy_context().run, args=(follower.run,)) for follower in followers
    ]
    for thread in threads:
        thread.start()
    try:
        join = partial(ThreadCollective, meeting, 0)
        yield RankZero(directory, [ours for ours, _ in pipes], device, join, Activity())
    finally:
        for ours, _ in pipes:
            ours.close()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)


@contextmanager
def process_ranks(
    directory: ModelDirectory,
    ranks: int,
    program: Sequence[str] = ("-m", "nightjar.gpu_worker.shards"),
) -> Iterator[RankZero]:
    """Rank 0 of a model in this process, whose other ranks follow in processes, over gloo.

    program: what Python runs there.
    """
    pipes = [Pipe() for _ in range(ranks - 1)]
    reader, life = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "store"
        config = ComputeConfig(
            directory.path, threads=ranks, shards=ranks, rank_late_after_s=PATIENCE_S
        )
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, *program),
                    encode(StartUp(config, theirs.fileno(), rank=rank, life=life, meeting=meeting)),
                ],
                pass_fds=[theirs.fileno(), life],
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank, (_, theirs) in enumerate(pipes, 1)
        ]
        met: list[TorchCollective] = []

        def join() -> TorchCollective:
            member = GroupMember(0, ranks, meeting, PATIENCE_S, activity)
            met.append(TorchCollective(member, "cpu"))
            return met[0]

        activity = Activity()
        try:
            yield RankZero(directory, [ours for ours, _ in pipes], "cpu", join, activity)
        finally:
            for ours, theirs in pipes:
                theirs.close()
                ours.close()
            for collective in met:
                collective.close()
            statuses = [process.wait(PATIENCE_S) for process in processes]
            os.close(reader)
            os.close(life)
    assert statuses == [0] * (ranks - 1)


def every_kind(vocab_size: int, longest: int) -> list[Request]:
    """Requests that use all that an engine can do, with prompts up to a length."""
    rng = np.random.default_rng(3)

    def ids(count: int) -> list[int]:
        return random_ids(rng, count, vocab_size)

    system = ids(longest - 10)
    documents = [ids(n) for n in (1, 4, 9, 2)]
    sampled = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "n": 3}
    return [
        *(generate(i, ids(1 + 9 * i), 9, logprobs=3) for i in range(4)),
        generate(10, [*system, *ids(2)], 4),
        generate(11, [*system, *ids(3)], 4, repetition_penalty=1.3, logit_bias={7: 2.0}),
        generate(12, ids(20), 6, **sampled),
        generate(13, ids(12), 6, beams=BeamSearch(3), n=3),
        generate(14, [vocab_size, vocab_size + 1, *ids(4), vocab_size], 6, "v", logprobs=1),
        RankRequest(20, ids(30), documents),
        RankRequest(21, ids(9), documents, top_n=2),
        RankRequest(22, [vocab_size, *ids(3)], [[5, vocab_size + 1, 9], [4]], "v"),
    ]


def answers(
    model: Decoder, token_bytes: Sequence[bytes], requests: Sequence[Request], **config: Any
) -> dict[int, Result]:
    """The results of requests that share a fresh engine; prompt vectors "v" are registered."""
    engine = Engine(model, token_bytes, EngineConfig(**config))
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(2, model.config.hidden_size, generator=generator) * 0.3
    engine.register_prompt_vectors("v", vectors)
    return drain(engine, *requests)


def assert_same(found: Mapping[int, Result], expected: Mapping[int, Result], tolerance: float):
    """Equal tokens; log-probabilities and likelihoods (nats) within the tolerance."""
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        other = found[key]
        if isinstance(one, RankResult):
            assert isinstance(other, RankResult)
            assert [n is None for n in other.mean_nll] == [n is None for n in one.mean_nll]
            scores = [[n for n in x.mean_nll if n is not None] for x in (other, one)]
            np.testing.assert_allclose(*scores, rtol=0, atol=tolerance)
            continue
        assert isinstance(one, GenerateResult), one
        assert isinstance(other, GenerateResult), other
        for text, whole in zip(other.outputs, one.outputs, strict=True):
            assert text.token_ids == whole.token_ids, key
            reports = zip(text.logprobs or (), whole.logprobs or (), strict=True)
            for report, expected_report in reports:
                assert abs(report.chosen - expected_report.chosen) <= tolerance


def first_logits(model: Decoder, token_bytes: Sequence[bytes], prompts: Sequence[list[int]]):
    """The scores after each prompt: float32[n, V]."""
    rows: list[Tensor] = []
    plain = model.logits

    def written(hidden: Tensor) -> Tensor:
        rows.append(plain(hidden).clone())
        return rows[-1].clone()

    model.logits = written  # type: ignore[method-assign]
    try:
        answers(model, token_bytes, [generate(i, p, 1) for i, p in enumerate(prompts)])
    finally:
        del model.logits
    return torch.cat(rows)
