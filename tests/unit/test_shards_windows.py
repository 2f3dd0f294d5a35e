"""Windows of decode steps over ranks: every rank samples by itself, and rank 0 sends nothing.

The CUDA kernels run on the CPU; the ranks are threads.
"""

import logging
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from nightjar.checkpoints import ModelDirectory, ShardError
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import load_model, padded_steps, shard
from nightjar.gpu_worker.models.decode_steps import DecodeSteps
from nightjar.gpu_worker.models.graphs import NotRecordedError
from nightjar.gpu_worker.models.shard import AgreedRecorder
from nightjar.gpu_worker.models.split import Part
from nightjar.gpu_worker.shards.commands import Clear, Copy, Forward, Logits, Window
from nightjar.gpu_worker.shards.rank_zero import RankZero
from nightjar.kernels.cuda import launch
from tests.cuda_host import schedule
from tests.engine_cuda.models import GPU_FAMILY, GPU_TINY
from tests.engine_cuda.requests import CACHE, prompt, tokens
from tests.engine_cuda.tape import Tapes
from tests.engines import assert_nothing_held, drain, generate, run
from tests.families import save_family
from tests.kernels_cuda.conftest import host  # noqa: F401
from tests.kernels_cuda.devices import run_on_host
from tests.models import save_gpt2
from tests.shards import Meeting, ThreadCollective, thread_ranks


@pytest.fixture(autouse=True)
def on_host(host):  # noqa: F811
    with launch.using(run_on_host), schedule(7):
        yield


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    return ModelDirectory.open(save_gpt2(tmp_path_factory.mktemp("split") / "gpt", GPU_TINY))


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    path = tmp_path_factory.mktemp("split") / "family"
    path.mkdir()
    return ModelDirectory.open(save_family(path, GPU_FAMILY))


@pytest.fixture
def texts(gpt):
    return gpt.tokenizer().token_bytes


def requests():
    """Sequences of every kind that the device continues by itself; they end at different steps."""
    kinds = (
        {},
        {"temperature": 0.9, "seed": 4, "top_k": 30},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"temperature": 1.1, "seed": 5, "top_p": 0.9, "presence_penalty": 0.7, "n": 2},
        {"stop": (b"e", b"th"), "stop_token_ids": (3, 9)},
    )
    return [
        generate(i, prompt(3 + 11 * i % 29, i), max_tokens=7 + i % 3, **kind)
        for i, kind in enumerate(kinds)
    ]


@contextmanager
def engine_over(directory, ranks=2, dtype="fp32", **config):
    with thread_ranks(directory, ranks) as rank_zero:
        config = EngineConfig(**(CACHE | {"window_steps": 4} | config))
        engine = Engine(rank_zero.load(dtype), directory.tokenizer().token_bytes, config)
        yield engine
        assert engine.windows is not None  # else launching has failed
        assert_nothing_held(engine)


def watch(monkeypatch):
    """The commands that rank 0 sends from now on, and the steps that each rank runs."""
    told, steps = [], []
    tell, launch_steps = RankZero.tell, DecodeSteps.launch
    monkeypatch.setattr(RankZero, "tell", lambda one, x: (told.append(x), tell(one, x))[1])

    def launching(one, count):
        launch_steps(one, count)
        steps.append((id(one), one.batch.tokens[:count].tolist()))

    monkeypatch.setattr(DecodeSteps, "launch", launching)
    return told, steps


@pytest.mark.parametrize("name", ["gpt", "family"])
def test_windows_of_ranks_write_what_single_steps_and_one_rank_write(name, request):
    directory = request.getfixturevalue(name)
    texts = directory.tokenizer().token_bytes
    with engine_over(directory) as engine:
        found = drain(engine, *requests())
    with engine_over(directory, window_steps=1) as engine:
        assert found == drain(engine, *requests())
    whole = run(load_model(directory, "fp32"), texts, requests(), **CACHE)
    assert tokens(found) == tokens(whole)


def test_rank_0_sends_one_command_a_window_and_nothing_a_step(gpt, monkeypatch):
    """Beside it there are commands about cache blocks only, before a window begins."""
    with engine_over(gpt) as engine:
        told, steps = watch(monkeypatch)
        drain(engine, *requests())
    windows = [command for command in told if isinstance(command, Window)]
    ranks = {rank for rank, _ in steps}
    assert len(ranks) == 2
    assert len(steps) == 2 * len(windows)
    assert sum(command.steps for command in windows) > 2 * len(windows)
    first = next(i for i, command in enumerate(told) if isinstance(command, Window))
    assert Counter(map(type, told[:first])) == {Forward: 1, Logits: 1, Copy: 1}
    assert {type(command) for command in told[first:]} <= {Window, Clear, Copy}
    # Sequences are sent once; a later window has only the tables of their blocks.
    begun = [command.batch is not None for command in windows]
    assert begun[0]
    assert not all(begun)


def test_every_rank_chooses_the_same_tokens_in_every_step(gpt, monkeypatch):
    with engine_over(gpt) as engine:
        _, steps = watch(monkeypatch)
        drain(engine, *requests())
    by_rank = {}
    for rank, chosen in steps:
        by_rank.setdefault(rank, []).append(chosen)
    first, second = by_rank.values()
    assert first == second
    assert len({token for window in first for step in window for token in step}) > 5


def test_windows_go_on_beside_sequences_that_need_the_host(gpt, texts, monkeypatch):
    """One of five has log-probabilities: its single steps come between the others' windows."""
    asked = [*requests(), generate(9, prompt(9, 9), max_tokens=4, logprobs=2)]
    whole = run(load_model(gpt, "fp32"), texts, asked, **CACHE)
    with engine_over(gpt, window_steps=2) as engine:
        told, _ = watch(monkeypatch)
        found = drain(engine, *asked)
    assert tokens(found) == tokens(whole)
    kinds = [type(command) for command in told if isinstance(command, Window | Forward)]
    assert kinds.count(Window) > 2
    assert Forward in kinds[kinds.index(Window) :]


def test_recorded_steps_of_ranks_write_what_one_rank_writes(gpt, texts, monkeypatch):
    """Each rank has a tape of its own, with its part of the exchanges on it."""
    recorders = []

    def on_tapes(steps, *given, plain=DecodeSteps.__init__):
        plain(steps, *given)
        steps.record = Tapes(run_on_host)
        recorders.append(steps.record)

    monkeypatch.setattr(DecodeSteps, "__init__", on_tapes)
    monkeypatch.setattr("tests.shards.ThreadCollective", TapedCollective)
    monkeypatch.setattr(padded_steps, "RECORDED_AT", 1)
    with engine_over(gpt, window_steps=3) as engine:
        found = drain(engine, *requests())
        again = drain(engine, *requests())
    monkeypatch.undo()
    assert tokens(found) == tokens(run(load_model(gpt, "fp32"), texts, requests(), **CACHE))
    assert again == found
    windows = [tape for recorder in recorders for tape in recorder.of_windows]
    assert len(windows) == 2
    assert windows[0].replays == windows[1].replays > 8
    first, second = (recorder.tapes for recorder in recorders)
    assert [tape.replays for tape in first] == [tape.replays for tape in second]
    assert len(first) > 1  # prompts too
    for tape in [*first, *second]:
        exchanged = Counter(name for name in tape.launches if name.startswith("exchange"))
        gathered = {"exchange gather": 1} if tape in windows else {}
        assert exchanged == {"exchange sum": 2 * gpt.config.n_layers} | gathered


class TapedCollective(ThreadCollective):
    """Exchanges that a tape plays back, as a CUDA graph plays NCCL's back."""

    def sum(self, x):
        return Tapes.exchange("sum", super().sum, x)

    def gather(self, x):
        return Tapes.exchange("gather", super().gather, x)


def test_a_rank_that_cannot_make_its_steps_says_why(gpt, texts, monkeypatch):
    plain = shard.ShardDecoder.decode_steps

    def no_room(model, *given):
        if model.part.rank == 1:
            raise MemoryError("no room here")
        return plain(model, *given)

    monkeypatch.setattr(shard.ShardDecoder, "decode_steps", no_room)
    with thread_ranks(gpt, 2) as rank_zero:
        model = rank_zero.load("fp32")
        with pytest.raises(ShardError, match=r"rank 1 cannot make its steps: .*no room here"):
            Engine(model, texts, EngineConfig(**CACHE))


@pytest.mark.parametrize("broken", [(), (1,), (0, 1)])
def test_a_step_is_recorded_on_all_ranks_or_on_none(gpt, broken, monkeypatch, caplog):
    recorded = []

    class Recording(ThreadCollective):
        is_recordable = True

    def record(rank, step):
        if rank in broken:
            raise NotRecordedError("operation failed during capture")

        def played():
            recorded.append(rank)
            step()

        return played

    def with_recorder(steps, model, *given, plain=DecodeSteps.__init__):
        plain(steps, model, *given)
        steps.record = AgreedRecorder(
            lambda step: record(model.part.rank, step), model.part, model.collective, "cpu"
        )

    monkeypatch.setattr(DecodeSteps, "__init__", with_recorder)
    monkeypatch.setattr("tests.shards.ThreadCollective", Recording)
    with caplog.at_level(logging.ERROR), engine_over(gpt) as engine:
        found = drain(engine, *requests())
    monkeypatch.undo()
    with engine_over(gpt) as engine:
        assert drain(engine, *requests()) == found
    assert set(recorded) == (set() if broken else {0, 1})
    said = [line for line in caplog.messages if "cannot record a step" in line]
    assert len(said) == len(broken)


def test_a_step_that_fails_in_its_exchanges_is_not_taken_for_one_that_is_not_recorded(gpt):
    """The other ranks wait in an exchange of the step: the next one must not be another."""

    class Counted(ThreadCollective):
        exchanges = 0

        def sum(self, x):
            self.exchanges += 1
            return x

    def no_room():
        raise torch.OutOfMemoryError("no room for the step's rows")

    def record(step):
        step()
        return step

    collective = Counted(Meeting(1), 0)
    recorder = AgreedRecorder(record, Part.of(gpt.config), collective, "cpu")
    with pytest.raises(torch.OutOfMemoryError):
        recorder(no_room)
    assert collective.exchanges == 0
    recorder(lambda: None)
    assert collective.exchanges == 1


@pytest.mark.parametrize("recordable", [True, False])
def test_only_exchanges_that_a_graph_can_hold_are_recorded(gpt, recordable):
    """A graph of a step that exchanges through the host would play back old numbers."""
    part = Part.of(gpt.config)
    collective = ThreadCollective(Meeting(1), 0)
    collective.is_recordable = recordable
    model = shard.ShardDecoder(load_model(gpt, "fp32", part=part), part, collective)
    recorder = model.recorder(0)
    assert isinstance(recorder, AgreedRecorder) == recordable

    def step():
        torch.zeros(1)

    assert recordable or recorder(step) is step
