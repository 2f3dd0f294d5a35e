"""One request in a thousand raises, crashes, hangs or exhausts memory when it is computed."""

from pathlib import Path

import pytest

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import NewJob, NewRequest, ResultRecord
from nightjar.jobs.states import RequestKind
from tests.faults.conftest import Note
from tests.faults.oracle import Answers, Verdict, most_in_flight, recomputed, told
from tests.faults.rows import MOST_ROWS, request_rows
from tests.faults.system import HASTE, System, running_system

CRASHES = 3  # the default of NIGHTJAR_REQUEST_CRASHES
ENVIRONMENT = HASTE | {
    "NIGHTJAR_MICRO_BATCH_REQUESTS": "16",
    "NIGHTJAR_WORKER_THREADS": "2",
    "NIGHTJAR_COMPUTE_STALLED_AFTER_S": "10",
}
# What is said of each in the end.
REASONS = {
    "raise": "PoisonError: the request's text asked for it",
    "crash": "was ended by SIGSEGV",
    "hang": "stalled: no step in",
    "memory": "was ended by SIGKILL",
}


def poisoned(index: int, kind: str) -> NewRequest:
    """Row `index` with a poison in its prompt."""
    body = {"prompt": f"<poison:{kind}> {index}", "max_tokens": 4, "temperature": 0}
    checked = validate_body(RequestKind.GENERATE, body)
    return NewRequest(index, index + 1, f"row-{index}", RequestKind.GENERATE, checked)


def submit(system: System, poison: dict[int, str]) -> str:
    rows = list(request_rows(MOST_ROWS))
    for index, kind in poison.items():
        rows[index] = poisoned(index, kind)
    with system.store.jobs.submit(NewJob("tiny")) as submission:
        submission.add(rows)
    system.jobs.append(submission.job_id)
    return submission.job_id


def assert_guilty(record: ResultRecord, kind: str) -> None:
    """It failed with what it did, and not because of a neighbour."""
    assert record.error is not None, (record.custom_id, kind)
    code = "internal_error" if kind == "raise" else "compute_lost"
    assert record.error.code == code, record.error
    assert REASONS[kind] in record.error.message, record.error
    if kind != "raise":
        assert f"computed alone {CRASHES} times" in record.error.message


@pytest.mark.slow
def test_one_request_in_a_thousand_is_poison(
    database_url: str, tiny_model: Path, tmp_path: Path, undisturbed: Answers, note: Note
) -> None:
    poisons = [{700: "raise", 1_700: "crash"}, {333: "hang", 1_333: "memory"}]
    with running_system(tmp_path, database_url, tiny_model, environment=ENVIRONMENT) as system:
        jobs = [submit(system, poison) for poison in poisons]
        system.wait_done()
        lost = twice = wrong = 0
        for job_id, poison in zip(jobs, poisons, strict=True):
            job, records = system.store.jobs.get(job_id), list(system.store.results.iterate(job_id))
            indexes = {record.index for record in records}
            lost += MOST_ROWS - len(indexes)
            twice += len(records) - len(indexes)
            for record in records:
                if record.index in poison:
                    assert_guilty(record, poison[record.index])
                else:
                    wrong += told(record) != undisturbed[str(record.custom_id)]
            assert (job.completed, job.failed) == (MOST_ROWS - len(poison), len(poison))
        verdict = Verdict(len(jobs) * MOST_ROWS, lost, twice, wrong, recomputed(system))
        deadly = sum(kind != "raise" for poison in poisons for kind in poison.values())
        said = "one each that raises, segfaults, hangs, exhausts memory; neighbours are answered"
        note(17, "poison, 1 request in 1,000", len(REASONS), verdict, note=said)
        # Each deadly one: what was in flight beside it, then its halves, quarters..., then alone.
        verdict.check(deadly * (most_in_flight(system) + 2 * 16 + CRASHES))
        assert system.restarted.total() == 0, system.restarted
