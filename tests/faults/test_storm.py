"""A storm of cancels, pauses and duplicate submits over HTTP, from many clients at once."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from nightjar.jobs.records import Job
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.pipeline.client import blocking
from nightjar.pipeline.client.blocking import Client
from tests.faults.api import answers_http, give_api
from tests.faults.conftest import Note
from tests.faults.oracle import Answers, Verdict, answers, recomputed
from tests.faults.rows import batch_file
from tests.faults.system import System, running_system
from tests.services import free_port

ROWS = 100
CLIENTS = 6


class Storm:
    """What many clients do at once, and what they were told.

    Args:
        api_url: Where the API answers.
        source: A file of batch lines.
        keys: So many jobs there will be, however often each is sent.
    """

    def __init__(self, api_url: str, source: Path, keys: int) -> None:
        self._api_url = api_url
        self._source = source
        self._keys = [f"key-{number}" for number in range(keys)]
        self._lock = threading.Lock()
        self.made: dict[str, set[str]] = {key: set() for key in self._keys}
        self.cancelled: set[str] = set()
        self.done: Counter[str] = Counter()

    def rage(self, acts: int) -> None:
        """All clients at once, `acts` acts each, after each key was sent by every client."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(partial(self._client, acts), range(CLIENTS)))

    def _client(self, acts: int, seed: int) -> None:
        rng = random.Random(seed)
        with Client(self._api_url) as client:
            for key in rng.sample(self._keys, len(self._keys)):
                self._submit(client, key)
                self._act(client, rng)
            for _ in range(acts):
                self._act(client, rng)

    def _submit(self, client: Client, key: str) -> None:
        job_id = client.submit(self._source, idempotency_key=key).id
        with self._lock:
            self.made[key].add(job_id)
            self.done["submit"] += 1

    def _act(self, client: Client, rng: random.Random) -> None:
        with self._lock:
            known = sorted({job_id for ids in self.made.values() for job_id in ids})
        if not known:
            return
        acts: list[Callable[[blocking.Job], object]] = [
            blocking.Job.pause,
            blocking.Job.resume,
            blocking.Job.resume,
        ]
        if rng.random() < 0.2:
            job_id = rng.choice(known[: len(known) // 2 + 1])  # the others should end by computing
            with self._lock:
                self.cancelled.add(job_id)
                self.done["cancel"] += 1
            client.job(job_id).cancel()
            return
        with self._lock:
            self.done["pause or resume"] += 1
        rng.choice(acts)(client.job(rng.choice(known)))


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "acts"), [(8, 10), pytest.param(80, 150, marks=pytest.mark.slow)])
def test_a_storm_of_cancels_and_duplicate_submits(
    keys: int,
    acts: int,
    database_url: str,
    tiny_model: Path,
    tmp_path: Path,
    undisturbed: Answers,
    note: Note,
) -> None:
    port = free_port()
    source = tmp_path / "in.jsonl"
    source.write_bytes(batch_file(ROWS))
    with running_system(
        tmp_path, database_url, tiny_model, prepare=partial(give_api, port)
    ) as system:
        api_url = f"http://127.0.0.1:{port}"
        system.wait_until("the API", lambda: answers_http(api_url))
        storm = Storm(api_url, source, keys)
        storm.rage(acts)
        assert all(len(ids) == 1 for ids in storm.made.values()), storm.made
        system.jobs += [job_id for ids in storm.made.values() for job_id in ids]
        assert {job.id for job in system.store.jobs.newest(10 * keys)} == set(system.jobs)
        for job_id in system.jobs:
            system.store.stopping.resume(job_id)
        system.wait_done()
        verdict = judge_storm(system, undisturbed, storm.cancelled)
        said = ", ".join(f"{count} times {act}" for act, count in sorted(storm.done.items()))
        times = storm.done.total()
        note(20, "a storm of cancels and duplicate submits", times, verdict, note=said)
        verdict.check(0)


def judge_storm(system: System, undisturbed: Answers, cancelled: set[str]) -> Verdict:
    """Every row has its undisturbed answer, or was cancelled with its job."""
    lost = twice = wrong = 0
    for job_id in system.jobs:
        job, records = system.store.jobs.get(job_id), list(system.store.results.iterate(job_id))
        found = answers(system.store, job_id)
        lost += ROWS - len(found)
        twice += len(records) - len(found) + max(0, job.ended - ROWS)
        failed = {name: answer[1][0] for name, answer in found.items() if answer[0] == "failed"}
        stopped = {name for name, code in failed.items() if code == "cancelled"}
        wrong += sum(found[name] != undisturbed[name] for name in found.keys() - stopped)
        check_end(job, len(stopped), was_cancelled=job_id in cancelled)
        open_states = set(MicroBatchState) - {MicroBatchState.DONE, MicroBatchState.CANCELLED}
        counts = system.store.jobs.get_in_detail(job_id)[1]
        assert not any(counts[state] for state in open_states), counts
    return Verdict(len(system.jobs) * ROWS, lost, twice, wrong, recomputed(system))


def check_end(job: Job, stopped: int, *, was_cancelled: bool) -> None:
    """The job's state and counters say what its rows say."""
    assert (job.completed, job.failed, job.cancelled) == (ROWS - stopped, 0, stopped), job
    allowed = {JobState.COMPLETED, JobState.CANCELLED} if was_cancelled else {JobState.COMPLETED}
    assert job.state in allowed, job
    assert not stopped or job.state is JobState.CANCELLED, job
