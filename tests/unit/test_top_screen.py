"""What `nightjar top` draws: it fits every terminal, and no text of others steers it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from rich.console import Console

from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store.depths import Depths, Queue
from nightjar.jobs.workers import WorkerStatus
from nightjar.pipeline.front.top.reading import Rates, Snapshot, rates
from nightjar.pipeline.front.top.screen import screen
from nightjar.pipeline.front.top.table import shared, short, span
from tests.reported_jobs import job

AT = datetime(2026, 11, 24, 3, tzinfo=UTC)
HOSTILE = "\x1b]0;owned\x07\x1b[2J[red]\u202egpj\r\n"
JOBS = [
    job(
        id=f"job_{n:028x}",
        tenant="owls",
        state=JobState.RUNNING,
        total=200,
        completed=49,
        failed=1,
        started_at=AT - timedelta(seconds=100),
    )
    for n in range(30)
]


def worker(n: int, host: str = "gpu-1", silent_s: float = 1.0, **model: object) -> WorkerStatus:
    said = {"name": "tiny", "device": "cuda:0", "running": 3, "slots": 8, "kv_blocks": 10}
    models = [said | {"kv_held": 4, "prefill_tokens": 5, "decode_tokens": 2} | model]
    status = {"host": host, "pid": n, "models": models, "micro_batch_count": 2}
    return WorkerStatus(f"{host}:{n}:ab", AT - timedelta(seconds=silent_s), status)


SNAPSHOT = Snapshot(
    at=AT,
    taken_s=10.0,
    depths=Depths(
        [
            Queue("f1", "generate", 32, MicroBatchState.READY, 12_345, AT - timedelta(hours=3)),
            Queue("f1", "generate", 32, MicroBatchState.LEASED, 2, AT - timedelta(hours=5)),
            Queue("f2", "rank", 64, MicroBatchState.DISPATCHED, 4, AT - timedelta(minutes=3)),
        ],
        jobs=40,
        rows=6_000,
        cut=False,
    ),
    jobs=JOBS,
    workers=[worker(7), worker(8, silent_s=60.0)],
    models={"f1": "tiny"},
)


def drawn(snapshot: Snapshot, width: int = 120, height: int = 30, trouble: str = "") -> list[str]:
    stream = StringIO()
    console = Console(file=stream, width=width, color_system=None)
    console.print(screen(snapshot, rates(None, snapshot), width, height, trouble))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("height", [4, 14, 24, 200])
@pytest.mark.parametrize("width", [12, 33, 40, 60, 80, 120, 240])
def test_the_picture_fits_the_terminal(width: int, height: int) -> None:
    lines = drawn(SNAPSHOT, width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 14)
    text = "\n".join(lines)
    assert all(name in text for name in ("Jobs", "Micro", "GPU"))


def test_a_wide_terminal_shows_everything() -> None:
    text = drawn(SNAPSHOT, height=100)
    lines = [line.split() for line in text]
    assert text[0] == "03:00:00 UTC  open jobs: 40  rows left: 6,000  rows/s: 15.0"
    assert ["Jobs", "(30", "of", "40)"] in lines
    (shown,) = [line for line in lines if line[:1] == [JOBS[3].id]]
    assert shown[1:3] == ["owls", "running"]
    assert shown[-4:] == ["25.0%", "1", "0.5", "5.0m"]
    assert ["tiny", "generate", "32", "12.35k", "0", "2", "5.0h"] in lines
    assert ["f2", "rank", "64", "0", "4", "0", "3.0m"] in lines
    assert ["gpu-1:7", "tiny", "cuda:0", "2", "3/8", "40%", "1s"] in lines


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    text = "\n".join(drawn(SNAPSHOT, width=40))
    assert f"{JOBS[0].id}  25.0%" in text  # a whole id can be copied
    assert "owls" not in text
    assert "12.35k" in text


def test_text_of_others_steers_no_terminal() -> None:
    odd = [worker(1, host=HOSTILE, name=HOSTILE, device=HOSTILE)]
    hostile = replace(JOBS[0], tenant=HOSTILE)
    snapshot = replace(SNAPSHOT, workers=odd, jobs=[hostile], models={"f1": HOSTILE})
    for width in (40, 240):
        text = "".join(drawn(snapshot, width, 60, trouble=HOSTILE))
        assert [char for char in text if not char.isprintable()] == []
        assert "\\x1b]0;owned\\x07" in text


def test_a_deployment_in_which_nothing_is_says_so() -> None:
    empty = replace(SNAPSHOT, depths=Depths([], 0, 0, cut=False), jobs=[], workers=[])
    text = "\n".join(drawn(empty))
    assert all(f"{name} (none)" in text for name in ("Jobs", "Micro-batches", "GPU workers"))


def test_a_worker_of_an_older_version_is_shown() -> None:
    old = WorkerStatus("gpu-9:1:aa", AT, {})
    assert any("gpu-9:1:aa" in line for line in drawn(replace(SNAPSHOT, workers=[old])))


def test_rates_are_those_between_two_pictures() -> None:
    done = replace(JOBS[0], completed=JOBS[0].completed + 30)
    fresh = replace(JOBS[1], id="job_new")
    counted = worker(7, prefill_tokens=65, decode_tokens=42)
    restarted = worker(8, prefill_tokens=0, decode_tokens=0)
    late = worker(9, prefill_tokens=1_000)  # not there before: since when it counts is not known
    now = replace(SNAPSHOT, taken_s=15.0, jobs=[done, fresh], workers=[counted, restarted, late])
    assert rates(SNAPSHOT, now) == Rates({done.id: 6.0, fresh.id: 0.0}, tokens=20.0)


def test_lines_are_divided_so_that_small_parts_are_whole() -> None:
    assert shared(20, [100, 3, 2]) == [15, 3, 2]
    assert shared(12, [100, 100, 2]) == [5, 5, 2]
    assert shared(5, [0, 9, 9]) == [0, 2, 3]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (9_999, "9999"), (10_000, "10k"), (123_456, "123.5k"), (5 * 10**10, "50G")],
)
def test_counts_are_short(count: int, shown: str) -> None:
    assert short(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-3, "0s"), (119, "119s"), (120, "2.0m"), (7_300, "2.0h"), (9e9, ">999d")],
)
def test_times_are_short(seconds: float, shown: str) -> None:
    assert span(seconds) == shown
