"""The tool that plants faults, without the library that makes them."""

import dataclasses
from datetime import date
from pathlib import Path

import psutil
import pytest

from tests.mutants import survivors
from tests.mutants.mutant import Fate, Trial
from tests.mutants.planted import MODULE, SOURCE, mutant, plant
from tests.mutants.report import UNEXPLAINED, Outcome, as_entry, page
from tests.mutants.survivors import Explanation
from tests.mutants.table import ROOT, TESTS, mutated_modules, without_entry
from tests.mutants.trials import UnmutatedError, try_all

EDGE = mutant("taken < most", "taken <= most")
TURNED = mutant("taken < most", "taken > most")
ONLY_ON_POSTGRES = mutant('"for update" if', '"" if')
ENDLESS = mutant("tries -= 1", "pass")


def test_every_mutated_module_has_its_tests_in_the_table() -> None:
    modules = mutated_modules()
    assert {
        "jobs/store/leases.py",
        "pipeline/embedded/run.py",
        "gpu_worker/worker/exclusive.py",
    } <= {*modules}
    assert without_entry(modules) == []
    assert sorted(TESTS.keys() - set(modules)) == []  # of modules that are gone


def test_every_test_file_of_the_table_is_there() -> None:
    named = {file for files in TESTS.values() for file in files}
    assert sorted(file for file in named if not (ROOT / file).is_file()) == []


def test_some_modules_are_chosen() -> None:
    chosen = mutated_modules(globs=["*/leases.py", "gpu_worker/*/ex*"])
    assert chosen == ["gpu_worker/worker/exclusive.py", "jobs/store/leases.py"]


def test_each_mutant_meets_its_fate(tmp_path: Path) -> None:
    plan = plant(tmp_path)
    told: list[Trial] = []
    trials = try_all(plan, [EDGE, TURNED, ONLY_ON_POSTGRES, ENDLESS], told.append)
    assert [trial.fate for trial in trials] == [
        Fate.SURVIVED,
        Fate.CAUGHT,
        Fate.CAUGHT,
        Fate.TIMED_OUT,
    ]
    assert trials[1].by.endswith("test_free")
    assert trials[2].by.endswith("test_lock[postgresql]")
    assert told == trials
    assert (plan.root / MODULE).read_text() == SOURCE
    assert not list(plan.root.rglob("__pycache__"))
    left = [int(pid) for pid in (tmp_path / "left-behind").read_text().split()]
    assert left
    assert not any(psutil.pid_exists(pid) for pid in left)


def test_two_copies_share_the_mutants(tmp_path: Path) -> None:
    plan = dataclasses.replace(plant(tmp_path), jobs=2)
    trials = try_all(plan, [EDGE, TURNED], lambda _: None)
    assert [trial.fate for trial in trials] == [Fate.SURVIVED, Fate.CAUGHT]


def test_a_run_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    def interrupt(_: Trial) -> None:
        raise KeyboardInterrupt

    plan = dataclasses.replace(plant(tmp_path), jobs=2)
    of_other_tests = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt):
        try_all(plan, [TURNED, *[ENDLESS] * 9], interrupt)
    assert set(psutil.Process().children(recursive=True)) <= of_other_tests


def test_tests_that_fail_without_a_mutant_stop_the_run(tmp_path: Path) -> None:
    plan = plant(tmp_path, tests="def test_wrong():\n    assert 1 == 2\n")
    with pytest.raises(UnmutatedError, match=r"test_wrong(.|\n)*assert 1 == 2"):
        try_all(plan, [EDGE], lambda _: None)


def test_a_budget_that_has_ended_begins_no_mutant(tmp_path: Path) -> None:
    plan = dataclasses.replace(plant(tmp_path), budget_s=0.0)
    (trial,) = try_all(plan, [EDGE], lambda _: None)
    assert trial.fate is Fate.NOT_RUN
    outcome = Outcome([trial], [])
    assert (outcome.tried, outcome.share) == (0, 0.0)
    assert "1 more mutants were not run" in page(outcome, command="x", on=date.today(), facts={})


def explanation(**changes: str) -> Explanation:
    module, where, before, after = EDGE.key
    fields = {"module": module, "where": where, "before": before, "after": after, "why": "Alike."}
    return Explanation(**fields | changes)


def test_a_survivor_needs_an_explanation() -> None:
    trials = [Trial(TURNED, Fate.CAUGHT)] * 9 + [Trial(EDGE, Fate.SURVIVED)]
    (fault,) = Outcome(trials, [explanation(where="elsewhere")]).faults
    assert fault.startswith("1 survivors are not explained")
    assert Outcome(trials, [explanation()]).faults == []
    unexplained = page(Outcome(trials, []), command="x", on=date(2026, 1, 2), facts={"Seed": "3"})
    assert f"(ByHand): **{UNEXPLAINED}**" in unexplained
    assert "  - taken < most\n  + taken <= most\n" in unexplained
    assert "| house/store.py | 10 | 9 | 0 | 90% |" in unexplained
    assert "on 2026-01-02 by `x`" in unexplained


def test_too_few_caught_is_a_fault() -> None:
    trials = [Trial(TURNED, Fate.TIMED_OUT)] * 84 + [Trial(EDGE, Fate.SURVIVED)] * 16
    assert Outcome(trials, [explanation()]).faults == ["84.0% caught, 85% are wanted"]
    assert Outcome([*trials[1:], trials[0], trials[0], *trials[:8]], [explanation()]).faults == []


def test_an_explanation_of_a_line_that_is_gone(tmp_path: Path) -> None:
    root = plant(tmp_path).root
    here = explanation(before="return taken < most")
    gone = [explanation(before="return taken"), explanation(module="house/cellar.py")]
    assert survivors.of_lines_gone([here, *gone], root) == gone
    assert Outcome([Trial(TURNED, Fate.CAUGHT)], [], gone).faults == [
        "2 explanations are of lines that are gone"
    ]


def test_explanations_are_read_as_they_are_printed(tmp_path: Path) -> None:
    odd = mutant('"for update" if', '"\\\\" if')
    file = tmp_path / "survivors.toml"
    file.write_text(as_entry(odd).replace('why = ""', 'why = "Nobody asks."'))
    assert survivors.why(odd, survivors.read(file)) == "Nobody asks."
    file.write_text(as_entry(odd))
    with pytest.raises(ValueError, match=r"survivors.toml, entry 1: `why` is empty"):
        survivors.read(file)
    file.write_text('[[survivor]]\nmodule = "x"')
    with pytest.raises(ValueError, match=r"entry 1: .*missing"):
        survivors.read(file)


def test_the_explanations_that_stand_there_can_be_read() -> None:
    assert all(each.module in TESTS for each in survivors.read())
