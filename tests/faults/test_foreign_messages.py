"""Fault 22, strangers in the queues: over a hundred kinds of messages that Nightjar did not send.

Real workers on a real broker get all of them, and must then still take a good message, the same
processes as before. One of them sufficed to end a class of workers, or to stop it unseen.
"""

import json
import secrets
from pathlib import Path

import psutil
import pytest
from celery import Celery
from pydantic import SecretStr

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.embedded.broker import broker_url
from nightjar.pipeline.queue.celery_app import COMPUTE_TASK, PLAN_TASK, TICK_TASK, create_celery_app
from nightjar.pipeline.queue.queues import PLAN_QUEUE, compute_queue
from nightjar.pipeline.settings import Settings
from tests.faults.conftest import Place
from tests.faults.system import HASTE, PLANNER, STEADY, System, running_system
from tests.foreign_messages import foreign_messages, good_message

pytestmark = pytest.mark.slow
KEY = secrets.token_hex(16)
PATIENCE_S = 30.0
EMPTIED_WITHIN_S = 60.0
MOST_MEMORY = 64 << 20


def compute_queue_of(system: System) -> str:
    """A queue that the GPU worker listens on."""
    model = ModelDirectory.open(system.environment["NIGHTJAR_MODEL"])
    return compute_queue(model.fingerprint, RequestKind.GENERATE, 32)


def send_all(system: System) -> int:
    """Put every kind into the queues of both workers; returns how many messages that were."""
    sent = 0
    for queue, task in ((compute_queue_of(system), COMPUTE_TASK), (PLAN_QUEUE, TICK_TASK)):
        for raw in foreign_messages(queue, task).values():
            for place in (queue, f"{queue}\x06\x169"):
                system.broker.lpush(place, raw)
                sent += 1
    return sent


def dropped(system: System) -> int:
    """How many messages both workers have dropped, by the counts that they logged last."""
    total = 0
    for name in ("worker-0", PLANNER):
        counts = system.log(name).split("foreign message dropped, ")[1:]
        total += int(counts[-1].split()[0]) if counts else 0
    return total


def empty(system: System) -> bool:
    """Whether all queues have been emptied."""
    queues = (compute_queue_of(system), PLAN_QUEUE)
    return not any(system.broker.llen(p) for q in queues for p in (q, f"{q}\x06\x169"))


def client(system: System, key: str | None = None) -> Celery:
    secret = None if key is None else SecretStr(key)
    url = SecretStr(broker_url(system.private))
    return create_celery_app(Settings(broker_url=url, message_key=secret))


def works(system: System) -> None:
    """The processes take a good job to its end."""
    system.submit(40)
    system.wait_done(PATIENCE_S)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "given"),
    [("no message key", {}), ("signed messages", {"NIGHTJAR_MESSAGE_KEY": KEY})],
    ids=["unsigned", "signed"],
)
def test_no_foreign_message_ends_or_stops_a_worker(
    place: Place, kind: str, given: dict[str, str]
) -> None:
    with place.system(environment=HASTE | STEADY | given) as system:
        works(system)
        pids = {name: system.pid(name) for name in system.services}
        memory = sum(psutil.Process(pids[name]).memory_info().rss for name in ("worker-0", PLANNER))
        sent = send_all(system)
        emptied_s = system.wait_until(
            "the queues to be empty", lambda: empty(system), EMPTIED_WITHIN_S
        )
        works(system)
        grown = sum(psutil.Process(pids[name]).memory_info().rss for name in ("worker-0", PLANNER))
        gone = dropped(system)
        verdict = place.judge(
            system,
            22,
            f"foreign messages of {sent // 4} kinds in every queue, {kind}",
            sent,
            recovery_s=emptied_s,
            note=f"until the queues were empty; {gone} dropped, no process ended or grew",
        )
        verdict.check(0)
        assert not system.restarted
        assert {name: system.pid(name) for name in system.services} == pids
        assert grown - memory < MOST_MEMORY
        assert sent > 2 * 2 * 100
        assert system.broker.keys("unacked*") == []  # nothing is kept to be delivered again
        assert gone == sent


def test_unsigned_and_wrongly_signed_messages_are_dropped(
    tmp_path: Path, sqlite_url: str, tiny_model: Path
) -> None:
    given = HASTE | {"NIGHTJAR_MESSAGE_KEY": KEY}
    with running_system(tmp_path, sqlite_url, tiny_model, environment=given) as system:
        works(system)
        for key in (None, secrets.token_hex(16)):
            with client(system, key) as app:
                app.send_task(PLAN_TASK, args=["no-such-job"])
                app.control.broadcast("ping", reply=False)
        with client(system) as app:
            app.control.broadcast("shutdown")  # signed or not: only questions are answered
        with client(system, KEY) as app:
            app.control.broadcast("shutdown")
            taken = app.send_task(PLAN_TASK, args=["no-such-job"])
            assert len(app.control.ping(timeout=3)) == 2
        system.wait_until("the good task", lambda: taken.id in system.log(PLANNER), PATIENCE_S)
        log = system.log(PLANNER)
        assert log.count("it is not signed") == 2
        assert log.count("its signature is wrong") == 2
        assert log.count("method has a wrong type") == 2
        assert log.count("Task nightjar.plan[") == log.count(f"Task nightjar.plan[{taken.id}]")
        works(system)
        assert not system.restarted


def test_a_signed_message_cannot_be_changed_or_moved(
    tmp_path: Path, sqlite_url: str, tiny_model: Path
) -> None:
    given = HASTE | {"NIGHTJAR_MESSAGE_KEY": KEY}
    with running_system(tmp_path, sqlite_url, tiny_model, environment=given) as system:
        system.kill(PLANNER)
        system.broker.delete(PLAN_QUEUE)
        with client(system, KEY) as app:
            app.send_task(PLAN_TASK, args=["no-such-job"])
        raw = next(m for m in system.broker.lrange(PLAN_QUEUE, 0, -1) if b"nightjar.plan" in m)
        system.broker.delete(PLAN_QUEUE)
        other = good_message(PLAN_QUEUE, PLAN_TASK, job_id="another-job")
        for part, value in (("body", other["body"]), ("headers", {"task": TICK_TASK})):
            changed = json.loads(raw)
            changed[part] = changed[part] | value if isinstance(value, dict) else value
            system.broker.lpush(PLAN_QUEUE, json.dumps(changed))
        system.start(PLANNER)
        works(system)
        assert system.log(PLANNER).count("its signature is wrong") == 2
