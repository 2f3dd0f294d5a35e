"""The tool that plants faults, without the library that makes them."""

import dataclasses
from datetime import date
from pathlib import Path

import psutil
import pytest

from tests.mutants import again, survivors
from tests.mutants.mutant import Fate, Trial
from tests.mutants.planted import MODULE, SOURCE, mutant, plant
from tests.mutants.report import CHANGED, UNEXPLAINED, Outcome, as_entry, page, run_again, whole_run
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
    assert "1 more mutants were not run" in page(outcome, how="")


def explanation(**changes: str) -> Explanation:
    module, where, before, after = EDGE.key
    fields = {"module": module, "where": where, "before": before, "after": after, "why": "Alike."}
    return Explanation(**fields | changes)


def test_a_survivor_needs_an_explanation() -> None:
    trials = [Trial(TURNED, Fate.CAUGHT)] * 9 + [Trial(EDGE, Fate.SURVIVED)]
    (fault,) = Outcome(trials, [explanation(where="elsewhere")]).faults
    assert fault.startswith("1 survivors are not explained")
    assert Outcome(trials, [explanation()]).faults == []
    how = whole_run(command="x", on=date(2026, 1, 2), facts={"Seed": "3"})
    unexplained = page(Outcome(trials, []), how=how)
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


DAY = date(2026, 1, 2)


def test_a_page_is_corrected_by_a_run_of_its_survivors() -> None:
    fates = [Fate.SURVIVED, Fate.SURVIVED, Fate.TIMED_OUT, Fate.CAUGHT, Fate.NOT_RUN]
    mutants = [EDGE, ONLY_ON_POSTGRES, ENDLESS, TURNED, TURNED]
    trials = [Trial(mutant, fate) for mutant, fate in zip(mutants, fates, strict=True)]
    text = page(Outcome(trials, []), how=whole_run(command="x", on=DAY, facts={"Seed": "3"}))
    past = again.read(text)
    assert [mutant.key for mutant in past.survivors] == [EDGE.key, ONLY_ON_POSTGRES.key]
    assert page(Outcome(past.trials, []), how=past.told) == text  # nothing is lost on the way

    ran = [Trial(EDGE, Fate.CAUGHT)]
    how = run_again(past.told, page="page.md", on=DAY, caught=2)
    joined = again.joined(past, [EDGE, ONLY_ON_POSTGRES], ran)
    corrected = page(Outcome(joined, []), how=how)
    assert "| **all** | 4 | 3 | 1 | 75% |" in corrected
    assert "by `python -m tests.mutants --survivors-of page.md`" in corrected
    assert EDGE.after not in corrected
    assert again.read(corrected).told == how
    assert run_again(how, page="page.md", on=DAY, caught=3) == how
    assert "The whole run had caught 2;" in how


def test_a_survivor_whose_line_has_changed_counts_as_not_caught() -> None:
    text = page(Outcome([Trial(EDGE, Fate.SURVIVED)], []), how="Run on a day.\n")
    joined = again.joined(again.read(text), [], [])
    assert Outcome(joined, []).share == 0.0
    assert Outcome(joined, []).unexplained == []
    assert CHANGED in page(Outcome(joined, []), how="")


def test_those_with_an_explanation_are_not_run_again() -> None:
    assert again.unexplained([EDGE, TURNED], [explanation()]) == [TURNED]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("Run on", "It ran on", "does not say how"),
        ("- house/store.py, somewhere (ByHand)", "house/store.py", "house/store.py: the table"),
    ],
)
def test_a_page_that_was_changed_by_hand_is_refused(old: str, new: str, told: str) -> None:
    text = page(Outcome([Trial(EDGE, Fate.SURVIVED)], []), how="Run on a day.\n")
    with pytest.raises(ValueError, match=told):
        again.read(text.replace(old, new))
