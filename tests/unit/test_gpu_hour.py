"""The first hour on a GPU: its order, its isolation with planted crashes, its pages."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import causes
from benchmarks.gpu.targets import CAUSES
from nightjar.kernels.cuda import launch, nvrtc
from nightjar.kernels.cuda.cubin_cache import PREBUILT, cubin, prebuild
from nightjar.kernels.cuda.kernel import Kernel
from tools.gpu_hour import command, counters, machine, stages
from tools.gpu_hour.apart import Group, Outcome, run_groups
from tools.gpu_hour.page import Page
from tools.gpu_hour.stages import STAGE_S, STAGES, Run

ROOT = Path(__file__).resolve().parents[2]
PASSES = "def test_before(): assert 1\n"
FILES = {
    "test_good.py": PASSES + "def test_after(): assert 1\n",
    "test_crashes.py": PASSES
    + "import os, signal\ndef test_crash(): os.kill(os.getpid(), signal.SIGSEGV)\n"
    + "def test_after(): assert 1\n",
    "test_loses.py": PASSES
    + "def test_lost(): raise RuntimeError('CUDA error: an illegal memory access was met')\n"
    + "def test_after(): assert 1\n",
    "test_hangs.py": PASSES
    + "import time\ndef test_hang(): time.sleep(60)\ndef test_after(): pass\n",
    "test_fails.py": PASSES + "def test_wrong():\n    assert 2 == 3, 'planted'\n",
    "test_broken.py": "import no_such_module\n",
    "test_skips.py": "import pytest\ndef test_skip(): pytest.skip('nothing here')\n",
    "test_empty.py": "",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of files with a crash, a lost device, a hang and an error planted, run together."""
    folder = tmp_path_factory.mktemp("planted")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    groups = [Group(name, (str(folder / name), f"--rootdir={folder}")) for name in FILES]
    found = run_groups(groups, jobs=2, ends=time.monotonic() + 60, test_s=2.0)
    assert [one.name for one in found] == list(FILES)
    return {one.name: one for one in found}


def test_a_crash_in_one_file_leaves_the_others_results(outcomes):
    good, crashed = outcomes["test_good.py"], outcomes["test_crashes.py"]
    assert good.is_good
    assert good.passed == 2
    # The tests around the crash have run, too: the last one in a second process.
    assert (crashed.passed, len(crashed.failed), crashed.not_run) == (2, 1, [])
    assert "SIGSEGV" in next(iter(crashed.failed.values()))


def test_after_a_lost_device_another_process_goes_on(outcomes):
    lost = outcomes["test_loses.py"]
    assert (lost.passed, len(lost.failed), lost.not_run) == (2, 1, [])
    assert lost.log.count("$ ") == 2


def test_a_hang_ends_by_its_own_limit(outcomes):
    hung = outcomes["test_hangs.py"]
    assert (hung.passed, len(hung.failed), hung.not_run) == (2, 1, [])
    assert hung.seconds < 30


def test_what_is_wrong_is_never_taken_for_passed(outcomes):
    assert {name for name, one in outcomes.items() if one.is_good} == {"test_good.py"}
    assert "no_such_module" in next(iter(outcomes["test_broken.py"].failed.values()))
    assert outcomes["test_skips.py"].skipped == 1
    assert outcomes["test_empty.py"].note == "no test was found"


def test_time_that_is_over_is_said(tmp_path):
    (tmp_path / "test_long.py").write_text(
        "import time\ndef test_long(): time.sleep(60)\n" + PASSES
    )
    groups = [Group(name, (str(tmp_path / "test_long.py"),)) for name in ("first", "second")]
    first, second = run_groups(groups, jobs=1, ends=time.monotonic() + 4, test_s=50)
    assert first.note == "no time left"
    assert "not finished in time" in next(iter(first.failed.values()))
    assert len(first.not_run) == 1
    assert second.note == "no time left"
    assert not second.is_good


def test_the_page_tells_what_is_wrong_first(outcomes, tmp_path):
    page = Page(1, "kernels", {"commit": "abc"})
    page.tests(list(outcomes.values()))
    text = page.write()
    assert text.startswith("# Stage 1, kernels: FAILED\n")
    assert "- test_crashes.py: 1 failed" in text
    assert "| test_good.py | 2 | 0 | 0 | 0 |" in text
    assert "First failure of test_fails.py" in text
    assert "AssertionError: planted" in text
    assert page.save(tmp_path).read_text() == text
    assert {path.name for path in tmp_path.iterdir()} == {
        "stage-1.md",
        "stage-1.json",
        "stage-1.log",
    }
    good = Page(1, "kernels", {})
    good.tests([outcomes["test_good.py"]])
    assert good.write().startswith("# Stage 1, kernels: passed\n")


@pytest.fixture
def run(tmp_path):
    return Run(False, tmp_path, tmp_path / "cubins", 1, 10.0, lambda line: None)


def test_kernels_come_before_the_engine_and_the_sanitizer_apart(run, monkeypatch):
    asked = []

    def watched(run, page, groups, ends, tool=None):
        asked.append(([group.name for group in groups], tool))

    monkeypatch.setattr(stages, "_run", watched)
    monkeypatch.setattr(machine, "versions", list)
    monkeypatch.setattr(machine, "prebuilt", lambda run: ("", True))
    monkeypatch.setattr(machine, "gpus", lambda: 2)
    assert list(STAGES) == [1, 2, 3, 4, 5]
    for number in (1, 2):
        STAGES[number].fill(run, Page(number, "", {}), time.monotonic() + 1)
    (kernels, _), (engine, _) = asked
    assert {name.split("/")[1] for name in kernels} == {"kernels_cuda"}
    assert {name.split("/")[1] for name in engine} == {"engine_cuda", "gpu"}
    assert not any("sanitizer" in name for name in kernels + engine)
    marked = {
        str(path.relative_to(ROOT))
        for folder in ("kernels_cuda", "engine_cuda", "gpu")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
    }
    left_out = {"tests/gpu/test_sanitizer.py"} | {
        f"tests/kernels_cuda/test_{name}.py" for name in ("kernel_budget", "planted_bugs")
    }
    assert set(kernels + engine) == marked - left_out


def test_one_gpu_is_not_asked_for_what_needs_two(run, monkeypatch):
    """A skipped test counts as failed, and so the stage would never pass there."""
    asked, page = [], Page(2, "engine", {})
    monkeypatch.setattr(stages, "_run", lambda run, page, groups, ends: asked.extend(groups))
    monkeypatch.setattr(machine, "gpus", lambda: 1)
    STAGES[2].fill(run, page, time.monotonic() + 1)
    assert "tests/gpu/test_engine.py" in {group.name for group in asked}
    assert "tests/gpu/test_ranks.py" not in {group.name for group in asked}
    assert "1 GPU: left out is what needs two, test_ranks.py" in page.write()


@pytest.mark.parametrize("dry", [False, True])
def test_every_stage_takes_the_prebuilt_kernels(dry, tmp_path, monkeypatch, capsys):
    """Each is a command of its own, perhaps a process that knows nothing of the first."""
    monkeypatch.setenv(PREBUILT, "")
    seen = []
    stage = stages.Stage("", lambda run, page, ends: seen.append(os.environ[PREBUILT]))
    monkeypatch.setitem(command.STAGES, 3, stage)
    monkeypatch.setattr(command, "device_fault", lambda: None)
    given = ["3", "--out", str(tmp_path), "--cubins", str(tmp_path / "built")]
    assert command.main([*given, *(["--dry-run"] if dry else [])]) == 0
    assert seen == ["" if dry else str(tmp_path / "built")]
    assert "Stage 3" in capsys.readouterr().out


def test_what_measures_the_whole_gpu_runs_alone(run):
    alone = [group.name for group in stages.files("gpu", run) if group.alone]
    assert alone == ["tests/gpu/test_memory.py"]


def test_every_stage_fits_into_a_command_of_ten_minutes():
    assert STAGE_S <= 540
    assert sum(one.budget_s for one in CAUSES.values()) <= STAGE_S - 60


def test_without_a_gpu_it_ends_in_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "tools/first_gpu_hour", "1", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    said = done.stdout + done.stderr
    assert said == "tools/first_gpu_hour: torch sees no CUDA device; --dry-run needs no GPU\n"
    assert not (tmp_path / "out").exists()


def test_flash_attention_is_as_the_engine_calls_it(monkeypatch):
    assert machine.flash_attention_fault() is None
    monkeypatch.setattr(machine, "FLASH_ARGUMENTS", machine.FLASH_ARGUMENTS | {"planted"})
    assert "flash attention has no planted" in machine.flash_attention_fault()


def test_prebuilt_kernels_need_no_compiler(tmp_path, monkeypatch):
    """They are taken whatever compiler there is, as long as the sources are the same."""
    kernel, built = Kernel.of("argmax", "argmax"), tmp_path / "built"
    assert prebuild("sm_90", [kernel], built) == 1
    monkeypatch.setenv(PREBUILT, str(built))
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 9))
    path, symbol = cubin(kernel, "sm_90", tmp_path / "own")
    assert path.parent == built
    assert symbol
    assert prebuild("sm_90", [kernel], built) == 0
    assert not (tmp_path / "own").exists()
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-DOTHER"))
    assert cubin(kernel, "sm_90", tmp_path / "own")[0].parent == tmp_path / "own"


def test_a_table_of_causes():
    results = {
        "all_on": {"status": "measured", "points": {"1": 1e-3, "8": 2e-3, "64": 4e-3}},
        "no_graphs": {"status": "measured", "points": {"1": 3e-3, "8": 4e-3, "64": 5e-3}},
        "no_windows": {"status": "failed", "reason": "out of memory"},
    }
    lines = causes.page(results).splitlines()
    assert lines[2] == "| everything on | 1000 us | 2000 us | 4000 us |"
    assert lines[3] == "| without CUDA graphs | 3000 us, 3.00x | 4000 us, 2.00x | 5000 us, 1.25x |"
    assert lines[4] == "| without windows | failed | failed | failed |"
    assert lines[5] == "| without prefetch | not run | not run | not run |"
    assert len(lines) == 2 + len(CAUSES)


NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","decode_attention","gpu__time_duration.sum","us","31.20"
"0","7","decode_attention","smsp__issue_active.avg.pct_of_peak_sustained_active","%","71.25"
"0","7","decode_attention","something else","%","1"
"""


def test_counters_are_read_from_the_profilers_table():
    found = counters.read(NCU)
    assert found == {
        "gpu__time_duration.sum": "31.20 us",
        "smsp__issue_active.avg.pct_of_peak_sustained_active": "71.25 %",
    }
    with pytest.raises(ValueError, match="LibraryNotLoaded"):
        counters.read("==ERROR== LibraryNotLoaded\n")


def test_what_is_profiled_runs(host_backend):
    for kernel, group in (("linear", 1), ("linear in FP8", 1), ("decode_attention", 4)):
        counters.launch_twice(kernel, group, "cpu")
        assert host_backend == [kernel.removesuffix(" in FP8")] * 2
        host_backend.clear()


@pytest.fixture
def host_backend(monkeypatch):
    """Launches are noted and not run: their wrappers check shapes before."""
    for name, small in (("BATCH", 2), ("CONTEXT", 64), ("KV_HEADS", 2), ("WIDTH", 128)):
        monkeypatch.setattr(counters, name, small)
    launched = []
    with launch.using(lambda kernel, *given: launched.append(kernel.entry)):
        yield launched


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has its own run")
def test_a_dry_run_of_a_stage(tmp_path, monkeypatch, capsys):
    """Stage 1 on one file; the other stages are run whole by `make test-all`."""
    monkeypatch.setattr(
        stages,
        "files",
        lambda folder, run, leave_out: [
            Group("argmax", ("tests/kernels_cuda/test_argmax.py", *run.marks))
        ],
    )
    assert command.main(["1", "--dry-run", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "# Stage 1, kernels: passed" in said
    assert "no number is a figure" in said
    assert (tmp_path / "stage-1.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", list(STAGES))
def test_the_whole_dry_run_of_a_stage_keeps_its_time(tmp_path, number):
    started = time.monotonic()
    assert command.main([str(number), "--dry-run", "--out", str(tmp_path)]) == 0
    assert time.monotonic() - started < STAGE_S


def test_an_outcome_without_tests_is_not_good():
    assert not Outcome("nothing").is_good
