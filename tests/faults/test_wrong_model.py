"""Fault 26: work waits while only a worker of another model, with another tokenizer, lives."""

from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from celery import Celery
from pydantic import SecretStr

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store.tables import micro_batch
from nightjar.pipeline.embedded.broker import broker_url
from nightjar.pipeline.queue.celery_app import COMPUTE_TASK, celery_queue, create_celery_app
from nightjar.pipeline.queue.queues import compute_queue
from nightjar.pipeline.settings import Settings
from tests.faults.conftest import Place
from tests.faults.load import let_pass
from tests.faults.rows import prompt
from tests.faults.system import BEAT, BROKER, HASTE, PLANNER, STEADY, System
from tests.models import Gpt2Shape, save_gpt2

pytestmark = pytest.mark.slow
ROWS = 300
ALONE_S = 10.0  # longer than a message is waited for: each is sent again
RIGHT, WRONG = "worker-0", "worker-1"


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer has merged fewer words."""
    shape = Gpt2Shape(vocab_size=260)
    return save_gpt2(tmp_path_factory.mktemp("models") / "other", shape, seed=1)


def attempts(system: System) -> int:
    """How often a micro-batch has been claimed."""
    with system.store.database.reading() as connection:
        return int(connection.scalar(sa.select(sa.func.sum(micro_batch.c.attempts))) or 0)


def mislead(app: Celery, other_model: Path, refs: list[MicroBatchRef]) -> None:
    """Send the messages of these micro-batches to the worker of the other model."""
    fingerprint = ModelDirectory.open(other_model).fingerprint
    queue = celery_queue(compute_queue(fingerprint, RequestKind.GENERATE, 32))
    for ref in refs:
        kwargs = {"micro_batch": ref.id, "epoch": ref.epoch}
        app.send_task(COMPUTE_TASK, kwargs=kwargs, queue=queue)


def skipped(system: System) -> int:
    """How many messages the wrong worker has taken and found nothing to claim for."""
    return system.log(WRONG).count("'outcome': 'skipped'")


def test_the_worker_of_another_model_computes_nothing(place: Place, other_model: Path) -> None:
    ours, theirs = (ModelDirectory.open(path).tokenizer() for path in (place.model, other_model))
    assert ours.encode_batch([prompt(0)]) != theirs.encode_batch([prompt(0)])
    system = System(
        place.folder, place.database_url, place.model, workers=2, environment=HASTE | STEADY
    )
    with closing(system):
        system.store.migrate()
        wrong = system.services[WRONG]
        wrong.environment = {**wrong.environment, "NIGHTJAR_MODEL": str(other_model)}
        system.start(BROKER, PLANNER, BEAT, WRONG)
        system.submit(ROWS)
        system.wait_until("its worker", lambda: " ready." in system.log(WRONG))
        system.wait_until("messages", system.store.planning.dispatched)
        refs = system.store.planning.dispatched()
        url = SecretStr(broker_url(system.private))
        with create_celery_app(Settings(broker_url=url)) as app:
            mislead(app, other_model, refs)
        system.wait_until(
            "them to be skipped",
            lambda: system.log(WRONG).count("'outcome': 'skipped'") >= len(refs),
        )
        let_pass(system, ALONE_S)
        claimed, ended = attempts(system), system.store.jobs.get(system.jobs[0]).ended
        system.start(RIGHT)
        done_s = system.wait_done()
        verdict = place.judge(
            system,
            26,
            f"a worker of another model alone for {ALONE_S:.0f} s, messages sent to it by mistake",
            len(refs),
            recovery_s=done_s,
            note=f"from the right worker's start to the end; {claimed} claims before it",
        )
        verdict.check(0)
        assert (claimed, ended) == (0, 0)
        assert system.log(WRONG).count("'outcome': ") == skipped(system) == len(refs)
        assert not system.restarted
