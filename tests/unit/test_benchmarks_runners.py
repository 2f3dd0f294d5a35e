"""Runners: the protocol, a process that is stopped while it is not asked, failures with reasons."""

import io
import json
import os
import random
import signal
import time
from dataclasses import replace

import psutil
import pytest

from benchmarks import compare, environments
from benchmarks.models import NEVER_GENERATED, TINY_GPT2, save_model
from benchmarks.peers import protocol
from benchmarks.peers.nightjar_engine import NightjarEngine
from benchmarks.peers.protocol import Generated, Generation, UnsupportedError, Workload
from benchmarks.systems import NIGHTJAR, SYSTEMS, Runner, SystemFailedError
from benchmarks.workloads import Sizes, Words, rank
from nightjar.checkpoints import ModelDirectory


class Echo:
    """A system that answers a prompt with its length."""

    def __init__(self):
        self.versions = {"echo": "1"}
        self.settings = "none"
        self.calls = []

    def load(self, model, precision, threads, converted):
        if precision != "fp32":
            raise UnsupportedError(f"no {precision}")

    def reset(self):
        self.calls.append("reset")

    def generate(self, requests):
        self.calls.append([len(request.token_ids) for request in requests])
        return [Generated(str(len(request.token_ids)), 1) for request in requests]

    def rank(self, rankings):
        raise ZeroDivisionError("by zero")


def ask(system, *messages):
    source = io.StringIO("".join(json.dumps(message) + "\n" for message in messages))
    answers = io.StringIO()
    protocol._serve(system, source, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def loading(precision="fp32"):
    return {
        "command": "load",
        "model": "m",
        "precision": precision,
        "threads": 2,
        "converted": "c",
    }


def running(kind, generations):
    return {"command": "run", "workload": Workload("w", kind, generations).to_json()}


def test_waves_are_handed_in_one_after_another():
    echo = Echo()
    generations = [Generation([0] * n, 4, wave=wave) for n, wave in ((1, 0), (2, 1), (3, 0))]
    loaded, ran = ask(echo, loading(), running("generate", generations))
    assert loaded["ok"]
    assert loaded["versions"] == {"echo": "1"}
    assert echo.calls == ["reset", [1, 3], [2]]
    assert [item["text"] for item in ran["outcome"]["generated"]] == ["1", "2", "3"]


def test_first_tokens_are_timed_one_by_one():
    echo = Echo()
    (ran,) = ask(echo, running("first_token", [Generation([0] * n, 1) for n in (5, 6, 7)]))
    assert echo.calls == ["reset", [5], [6], [7]]
    assert len(ran["outcome"]["seconds_each"]) == 3
    assert sum(ran["outcome"]["seconds_each"]) <= ran["seconds"]


def test_a_failure_is_an_answer_and_the_runner_goes_on(capfd):
    refused, failed, ran = ask(
        Echo(), loading("int8"), running("rank", []), running("generate", [Generation([1], 1)])
    )
    assert refused == {"ok": False, "error": "no int8"}
    assert failed == {"ok": False, "error": "ZeroDivisionError: by zero"}
    assert ran["ok"]
    assert "by zero" in capfd.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("runner") / "tiny", TINY_GPT2)


@pytest.fixture(scope="module")
def words(model):
    return Words.of(ModelDirectory.open(model).tokenizer().token_bytes, NEVER_GENERATED)


def wait_for(process, status):
    for _ in range(200):
        if process.status() == status:
            return True
        time.sleep(0.05)
    return False


def test_a_runner_process_of_the_engine(model, words, tmp_path):
    rng = random.Random(5)
    generations = [Generation(words.draw(rng, n), 6) for n in (3, 40, 12)]
    texts = Workload("texts", "generate", generations)
    ranking = rank(words, rng, Sizes(rank_queries=2)).head(20)
    alone = NightjarEngine()
    alone.load(model, "fp32", 2, tmp_path)
    runner = Runner(NIGHTJAR, "fp32", 2, tmp_path / "log")
    try:
        assert runner.load(model, tmp_path)["versions"]["torch"]
        process = psutil.Process(runner._process.pid)
        assert wait_for(process, psutil.STATUS_STOPPED)
        ran = compare.parse_outcome(runner.run(texts)["outcome"])
        assert ran.generated == alone.generate(generations)
        scored = compare.parse_outcome(runner.run(ranking)["outcome"])
        assert scored.mean_nll == alone.rank(ranking.rankings)
        assert wait_for(process, psutil.STATUS_STOPPED)
        with pytest.raises(SystemFailedError, match="context"):
            runner.run(Workload("long", "generate", [Generation([300] * 2000, 1)]))
        assert runner.run(texts)["seconds"] > 0
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(SystemFailedError, match="ended with -9"):
            runner.run(texts)
    finally:
        runner.close()


def test_a_precision_that_does_not_exist(model, tmp_path):
    with pytest.raises(UnsupportedError, match="fp7"):
        NightjarEngine().load(model, "fp7", 2, tmp_path)


def test_a_peer_without_environment_is_reported(model, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "CACHE", tmp_path)
    options = compare.Options(["tiny-gpt2"], ["vllm"], ["fp32", "int8"], 1, 1.0, 1.0, 2)
    contest = compare.Contest(model, options, tmp_path)
    contest.start()
    contest.measure({})
    (record,) = contest.records
    figures = compare.record_figures(record, None)
    assert figures == {
        "system": "vllm",
        "precision": "fp32",
        "failed": "not installed: python -m benchmarks.environments vllm",
    }


def test_an_installation_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "CACHE", tmp_path)
    monkeypatch.setattr(environments, "REQUIREMENTS", tmp_path)
    (tmp_path / "requirements-odd.txt").write_text("./no-such-directory\n")
    assert environments.peer_names() == ["odd"]
    reason = environments.make_environment("odd")
    assert reason.startswith("installation failed")
    assert environments.failure_of("odd") == reason
    (tmp_path / "requirements-odd.txt").write_text("# nothing\n")
    assert environments.make_environment("odd") is None
    assert environments.failure_of("odd") is None


def test_every_peer_has_an_environment_and_a_runner():
    peers = {name: spec for name, spec in SYSTEMS.items() if not spec.ours}
    assert sorted(peers) == environments.peer_names()
    for spec in SYSTEMS.values():
        file = environments.REQUIREMENTS / f"{spec.module}.py"
        assert file.is_file(), spec.name


def test_what_fits_the_budget(words):
    """A system is given what it does in the budget, found by growing parts of the workload."""

    class Clock:
        def __init__(self):
            self.asked = []

        def run(self, workload):
            self.asked.append(workload.units)
            return {"seconds": workload.units * 0.1}

    options = compare.Options([], [], [], 1, 1.0, 4.0, 2)
    contest = compare.Contest(environments.ROOT, options, environments.ROOT)
    goal = rank(words, random.Random(0), Sizes())
    workload = replace(goal, name="catalogue")
    clock, peer = Clock(), compare.SystemRecord("vllm", "fp32", ours=False)
    assert contest._units(peer, clock, workload) == 40
    assert clock.asked == [4, 4, 16]
    # The goals get twelve budgets, and ours runs them whole however long it takes.
    slow = Clock()
    slow.run = lambda part: {"seconds": part.units * 0.5}
    assert contest._units(peer, slow, goal) == 96
    ours = compare.SystemRecord("nightjar", "fp32", ours=True)
    assert contest._units(ours, slow, goal) == goal.units
    assert contest._units(peer, Clock(), workload.head(8)) == 8
    own = replace(workload, name="mixed_lengths")
    assert contest._units(peer, Clock(), own) == workload.units


def test_a_peer_far_behind_runs_one_round(words):
    options = compare.Options([], [], [], 1, 1.0, 4.0, 2)
    contest = compare.Contest(environments.ROOT, options, environments.ROOT)
    for name, seconds, ours in (("a", 1.0, False), ("b", 1.9, False), ("c", 2.1, False)):
        measured = {"rank": compare.Measured(10, 10, [seconds])}
        contest.records.append(compare.SystemRecord(name, "fp32", ours, measured=measured))
    measured = {"rank": compare.Measured(10, 10, [50.0])}
    contest.records.append(compare.SystemRecord("nightjar", "fp32", True, measured=measured))
    workload = rank(words, random.Random(0), Sizes())
    names = [[r.system for r in contest._in_turn(number, workload)] for number in range(2)]
    assert names == [["a", "b", "c", "nightjar"], ["b", "nightjar", "a"]]


@pytest.mark.parametrize(
    ("arguments", "words_"),
    [
        (["--systems", "vllm,tgi"], "tgi: not among"),
        (["--models", "gpt5"], "gpt5: not among"),
        (["--rounds", "0"], "--rounds from 1"),
        (["--scale", "2"], "at most 1"),
    ],
)
def test_arguments_that_make_no_sense(capsys, arguments, words_):
    with pytest.raises(SystemExit):
        compare.parse(arguments)
    assert words_ in capsys.readouterr().err
