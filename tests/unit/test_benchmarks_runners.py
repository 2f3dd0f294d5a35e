"""Runners: their protocol, a process that is stopped while idle, failures with reasons."""

import io
import json
import os
import random
import re
import signal
import time
from dataclasses import replace

import msgspec
import psutil
import pytest

from benchmarks import compare, models, report, systems
from benchmarks.contest import Contest
from benchmarks.figures import SystemRecord, record_figures
from benchmarks.harness import ROOT
from benchmarks.models import save_model
from benchmarks.peers import protocol
from benchmarks.peers.nightjar_peer import NightjarEngine
from benchmarks.peers.protocol import (
    Answer,
    Generated,
    Generation,
    Message,
    Outcome,
    Ranking,
    System,
    Workload,
)
from benchmarks.systems import NIGHTJAR, SYSTEMS, Runner, SystemFailedError
from benchmarks.weights import TINY_GPT2
from benchmarks.workloads import Sizes, build, rank, rank_long


class Echo(System):
    """A system that answers a prompt with its length."""

    def __init__(self):
        self.versions = {"echo": "1"}
        self.settings = "none"
        self.calls = []

    def load(self, model, precision, threads, converted):
        if precision != "fp32":
            raise ValueError(f"no {precision}")

    def reset(self):
        self.calls.append("reset")

    def generate(self, requests):
        self.calls.append([len(request.token_ids) for request in requests])
        return [Generated(str(len(request.token_ids)), 1) for request in requests]

    def rank(self, rankings):
        raise ZeroDivisionError("by zero")


def ask(system, *messages):
    source = io.BytesIO(b"".join(msgspec.json.encode(message) + b"\n" for message in messages))
    answers = io.BytesIO()
    protocol.answer_all(system, source, answers)
    return [msgspec.json.decode(line, type=Answer) for line in answers.getvalue().splitlines()]


def loading(precision="fp32"):
    return Message(None, "m", precision, 2, "c")


def running(*generations):
    return Message(run=Workload("w", list(generations)))


def test_waves_are_handed_in_one_after_another():
    echo = Echo()
    generations = [Generation([0] * n, 4, wave=wave) for n, wave in ((1, 0), (2, 1), (3, 0))]
    loaded, ran = ask(echo, loading(), running(*generations))
    assert loaded.versions == {"echo": "1"}
    assert echo.calls == ["reset", [1, 3], [2]]
    assert [one.text for one in ran.outcome.generated] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a cima", " a"), (" a ", " a"), (" a", " a"), (" a cima ", " a"), ("", "")],
)
def test_a_text_without_the_part_of_a_stop_that_it_ends_in(text, shown):
    assert protocol.without_part(text, " cima ") == shown


def test_first_tokens_are_timed_one_by_one():
    echo = Echo()
    waves = [Generation([0] * n, 1, wave=n) for n in (5, 6, 7)]
    (ran,) = ask(echo, running(*waves))
    assert echo.calls == ["reset", [5], [6], [7]]
    assert len(ran.outcome.seconds_each) == 3
    assert sum(ran.outcome.seconds_each) <= ran.seconds


def test_a_failure_is_an_answer_and_the_runner_goes_on(capfd):
    ranking = Message(run=Workload("r", rankings=[Ranking([1], [[2]])]))
    refused, failed, ran = ask(Echo(), loading("int8"), ranking, running(Generation([1], 1)))
    assert refused == Answer(error="ValueError: no int8")
    assert failed == Answer(error="ZeroDivisionError: by zero")
    assert ran.outcome.generated
    assert "by zero" in capfd.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("runner") / "tiny", TINY_GPT2)


@pytest.fixture
def words():
    return TINY_GPT2.words


def wait_for(process, status):
    for _ in range(200):
        if process.status() == status:
            return True
        time.sleep(0.05)
    return False


def test_a_runner_that_reads_nothing_any_more_is_closed(tmp_path):
    runner = Runner(NIGHTJAR, "fp32", 1, tmp_path / "log")
    process = psutil.Process(runner.process.pid)
    process.kill()
    assert wait_for(process, psutil.STATUS_ZOMBIE)
    with pytest.raises(SystemFailedError, match="was ended by SIGKILL"):
        runner.run(Workload("short", [Generation([300], 1)]))
    runner.close()
    assert not process.is_running()


def test_a_runner_process_of_the_engine(model, words, tmp_path):
    rng = random.Random(5)
    generations = [Generation(rng.choices(words, k=n), 6) for n in (3, 40, 12)]
    texts = Workload("texts", generations)
    ranking = rank(words, rng, Sizes(rank_queries=2)).head(20)
    alone = NightjarEngine()
    alone.load(model, "fp32", 2, tmp_path)
    runner = Runner(NIGHTJAR, "fp32", 2, tmp_path / "log")
    try:
        assert runner.load(model).versions["torch"]
        process = psutil.Process(runner.process.pid)
        assert wait_for(process, psutil.STATUS_STOPPED)
        assert runner.run(texts).outcome.generated == alone.generate(generations)
        assert runner.run(ranking).outcome.mean_nll == alone.rank(ranking.rankings)
        assert wait_for(process, psutil.STATUS_STOPPED)
        with pytest.raises(SystemFailedError, match="context"):
            runner.run(Workload("long", [Generation([300] * 2000, 1)]))
        assert runner.run(texts).seconds > 0
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(SystemFailedError, match="was ended by SIGKILL"):
            runner.run(texts)
    finally:
        runner.close()


def test_a_precision_that_does_not_exist(model, tmp_path):
    with pytest.raises(ValueError, match="fp7"):
        NightjarEngine().load(model, "fp7", 2, tmp_path)


def test_a_peer_without_environment_is_reported(model, tmp_path, monkeypatch):
    monkeypatch.setattr(systems, "VENVS", tmp_path)
    contest = Contest(model, tmp_path, 2, 1.0)
    contest.start(["vllm"], ["fp32", "int8"])
    contest.measure({}, 1, lambda: None)
    (record,) = contest.records
    figures = record_figures(record, None, {})
    assert figures == {
        "system": "vllm",
        "precision": "fp32",
        "failed": "not installed: make bench-peers",
    }


def test_an_installation_that_failed_says_why(tmp_path, monkeypatch):
    """By the last line of what pip said; what it warned of is no failure."""
    monkeypatch.setattr(systems, "VENVS", tmp_path)
    (tmp_path / "vllm.failed").write_text("collecting\nERROR: no such wheel\n")
    assert systems.failure_of("vllm") == "installation failed: ERROR: no such wheel"
    (tmp_path / "vllm.made").touch()
    assert systems.failure_of("vllm") is None


def test_every_peer_has_an_environment_and_a_runner():
    peers = {name for name, spec in SYSTEMS.items() if not spec.ours}
    made = re.search(r"^PEERS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert set(made.split()) == peers
    folder = ROOT / "benchmarks" / "peers"
    assert all((folder / f"requirements-{name}.txt").is_file() for name in peers)
    assert all((folder / f"{name}_peer.py").is_file() for name in SYSTEMS)


class Clock:
    """A runner that takes the same time for every unit; it writes its name to a log at each run."""

    def __init__(self, seconds_each, name="", log=None):
        self.asked = []
        self.seconds_each = seconds_each
        self.name = name
        self.log = [] if log is None else log

    def close(self):
        pass

    def run(self, workload):
        self.asked.append(workload.units)
        self.log.append(self.name)
        each = [self.seconds_each] * workload.units if workload.name == "first_token" else []
        return Answer(workload.units * self.seconds_each, 1.0, Outcome(seconds_each=each))


def contest_of(*taking_part, budget_s=4.0):
    """A contest of records and their runners."""
    contest = Contest(ROOT, ROOT, 2, budget_s)
    for record, runner in taking_part:
        contest.add(record, runner)
    return contest


def peer_of(name="vllm", precision="fp32"):
    return SystemRecord(name, precision, ours=False)


def units(record, clock, workload, budget_s=7.0):
    """How much of a workload a system runs in its first round."""
    contest = contest_of((record, clock), budget_s=budget_s)
    contest.measure({workload.name: workload}, 1, lambda: None)
    return record.measured[workload.name].units


def test_a_peer_runs_what_fits_the_budget_and_no_less_than_fills_its_batches(words):
    workload = rank(words, random.Random(0), Sizes())
    assert units(peer_of(), clock := Clock(0.1), workload) == 80  # 68 fit; rankings are of 16
    assert clock.asked[:2] == [4, 4]
    assert units(peer_of(), Clock(9.0), workload) == 48
    assert units(peer_of(), Clock(9.0), replace(workload, name="rank_long")) == 16
    long = rank_long(words, random.Random(0), Sizes())
    assert units(peer_of(), Clock(0.2), long) == 100  # within three budgets
    assert units(peer_of(), Clock(0.3), long) == 20
    assert units(peer_of(), Clock(0.001), workload) == workload.units == 192
    assert units(peer_of(), Clock(9.0), workload.head(8)) == 8
    texts = Workload("generate", [Generation([1], 1)] * 96)
    assert units(peer_of(), Clock(0.3), texts) == 64  # three budgets
    assert units(peer_of(), Clock(9.0), texts) == 48


def test_what_the_goals_compare_is_run_once_before_it_counts(words):
    for name, runs in (("rank", 2), ("rank_long", 1)):
        clock, peer = Clock(0.001), peer_of()
        assert units(peer, clock, replace(rank(words, random.Random(0), Sizes()), name=name)) == 192
        assert clock.asked == [4, 4] + [192] * runs
        assert peer.measured[name].seconds == [192 * 0.001]


def test_ours_runs_workloads_whole(words):
    for workload in build(words, Sizes(), lambda asked: [Generated("", 0)] * len(asked)).values():
        ours = SystemRecord("nightjar", "fp32", ours=True)
        assert units(ours, Clock(9.0), workload) == workload.units


def test_after_the_first_round_two_peers_of_a_precision_go_on(words):
    log, found = [], []
    speeds = {"a fp32": 1.0, "b fp32": 3.0, "c fp32": 2.0, "c int8": 9.0, "nightjar fp32": 25.0}
    taking_part = []
    for label, speed in speeds.items():
        name, precision = label.split()
        record = SystemRecord(name, precision, ours=name == "nightjar")
        taking_part.append((record, Clock(speed / 1000, label, log)))
    contest = contest_of(*taking_part)

    def keep():
        found.append(list(dict.fromkeys(log)))
        del log[:]

    workload = rank(words, random.Random(0), Sizes())
    workloads = {name: replace(workload, name=name) for name in ("rank", "catalogue")}
    contest.measure(workloads, 3, keep)
    everyone = list(speeds)
    assert found[:2] == [everyone] * 2
    fastest = ["c fp32", "c int8", "nightjar fp32", "a fp32"]
    assert found[2:5] == [fastest] * 3
    assert found[5] == []


def test_figures_are_kept_after_every_workload(words):
    contest = contest_of((SystemRecord("nightjar", "fp32", ours=True), Clock(0.01)))
    workload = rank(words, random.Random(0), Sizes())
    workloads = {name: replace(workload, name=name) for name in ("rank", "catalogue")}
    kept = []

    def keep():
        measured = contest.records[0].measured
        kept.append((contest.rounds_done, {n: len(one.seconds) for n, one in measured.items()}))

    contest.measure(workloads, 2, keep)
    assert kept == [
        (0, {"rank": 1}),
        (1, {"rank": 1, "catalogue": 1}),
        (1, {"rank": 2, "catalogue": 1}),
        (2, {"rank": 2, "catalogue": 2}),
    ]


def test_a_result_file_keeps_the_models_of_other_runs(tmp_path):
    path = tmp_path / "peers.json"
    run = {"date": "2026-01-01", "command": "c"}
    for name, ratio in (("llama-0.44b", 2.0), ("gpt2-small", 3.0), ("llama-0.44b", 4.0)):
        compare.add_to(path, name, run, time.monotonic(), {"ratios_of": {"rank": ratio}})
    found = json.loads(path.read_text())
    assert {name: one["ratios_of"]["rank"] for name, one in found["models"].items()} == {
        "llama-0.44b": 4.0,
        "gpt2-small": 3.0,
    }
    assert found["models"]["gpt2-small"]["command"] == "c"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_run_writes_a_result_that_the_page_can_show(tmp_path, monkeypatch):
    """The tiny model, our engine alone, two workloads; the stops come from the engine itself."""
    monkeypatch.setattr(compare, "CACHE", tmp_path)
    monkeypatch.setattr(compare, "LOGS", tmp_path)
    monkeypatch.setattr(models, "CACHE", tmp_path)

    def reference(model, threads, asked):
        system = NightjarEngine()
        system.load(model, "fp32", threads, model)
        return system.generate(asked)

    monkeypatch.setattr(compare, "reference_texts", reference)
    arguments = ["--models", "tiny-gpt2", "--systems", "nightjar", "--precisions", "fp32,int8"]
    arguments += ["--workloads", "generate,rank", "--rounds", "1", "--scale", "0.1"]
    compare.main([*arguments, "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())["models"]["tiny-gpt2"]
    assert found["rounds_done"] == 1
    for precision in ("fp32", "int8"):
        measured = found["systems"][f"nightjar {precision}"]["workloads"]
        assert measured["rank"]["units"] == measured["rank"]["of"] == 32
        texts = measured["generate"]
        assert texts["ended_by_stop"] >= 0.9
        assert texts["tokens_a_text"] < 20
        assert texts["tokens_per_s"] == pytest.approx(
            texts["tokens_a_text"] * texts["rate"], rel=0.01
        )
    assert "| nightjar fp32 |" in report.MODEL_BLOCKS["rates"](found)


@pytest.mark.parametrize(
    ("arguments", "words_"),
    [
        (["--systems", "vllm,tgi"], "tgi: not among"),
        (["--models", "gpt5"], "gpt5: not among"),
        (["--workloads", "generate,chat"], "chat: not among"),
    ],
)
def test_arguments_that_make_no_sense(capsys, arguments, words_):
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert words_ in capsys.readouterr().err
