"""The broker is reached through Sentinel, with passwords, and follows the master."""

from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from nightjar.pipeline.front.doctor.findings import Level
from nightjar.pipeline.front.doctor.services import check_broker
from nightjar.pipeline.queue.celery_app import TICK_TASK, create_celery_app
from nightjar.pipeline.queue.queues import PLAN_QUEUE
from nightjar.pipeline.queue.waking import messages_waiting
from nightjar.pipeline.settings import Settings
from tests.processes import wait_until
from tests.sentinels import MASTER_NAME, ReplicatedBroker, replicated_broker


@pytest.fixture(scope="module")
def broker() -> Iterator[ReplicatedBroker]:
    with replicated_broker() as started:
        yield started


def test_a_wrong_password_of_sentinel_is_a_fault(broker: ReplicatedBroker) -> None:
    wrong = Settings(
        broker_url=SecretStr(broker.url),
        broker_master_name=MASTER_NAME,
        broker_sentinel_password=SecretStr("another"),
    )
    (found,) = check_broker(wrong)
    assert found.level is Level.FAULT
    assert "NIGHTJAR_BROKER_URL" in found.mend
    assert "another" not in f"{found}"


def test_messages_follow_the_master(broker: ReplicatedBroker) -> None:
    settings = Settings(
        broker_url=SecretStr(broker.url),
        broker_master_name=MASTER_NAME,
        broker_sentinel_password=SecretStr("of-sentinel"),
    )
    assert Level.FAULT not in {found.level for found in check_broker(settings)}
    with create_celery_app(settings) as app:
        app.send_task(TICK_TASK)
        assert messages_waiting(app, PLAN_QUEUE) == 1
        broker.kill_master()
        wait_until("the replica to be promoted", broker.was_promoted, 60)
        app.send_task(TICK_TASK)
        assert messages_waiting(app, PLAN_QUEUE) >= 1
    assert Level.FAULT not in {found.level for found in check_broker(settings)}
