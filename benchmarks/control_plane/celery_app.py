"""Plain Celery as people set it up: one task a request, acknowledged late, results in SQL."""

import os
from functools import cache
from pathlib import Path
from typing import Any

from celery import Celery

app = Celery(
    "plain",
    broker=os.environ.get("NIGHTJAR_BROKER_URL", "redis://127.0.0.1:6379/0"),
    backend=os.environ.get("PLAIN_BACKEND", "db+sqlite:///plain.db"),
)
app.conf.update(
    task_acks_late=True,
    task_serializer="json",
    accept_content=["json"],
    broker_connection_retry_on_startup=True,
)


@cache
def _parts() -> tuple[Any, Any]:
    from nightjar.checkpoints import ModelDirectory  # noqa: PLC0415 - not for the client
    from nightjar.gpu_worker.compute.fake_engine import FakeEngine  # noqa: PLC0415

    tokenizer = ModelDirectory.open(Path(os.environ["PLAIN_MODEL"])).tokenizer()
    return tokenizer, FakeEngine(tokenizer.token_bytes)


@app.task(name="plain.generate")
def generate(custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """Tokenize, compute with the same fake engine, answer."""
    from nightjar.gpu_worker.engine import GenerateRequest, SamplingParams  # noqa: PLC0415

    tokenizer, engine = _parts()
    ids = tokenizer.encode(body["prompt"])
    engine.submit(GenerateRequest(1, ids, SamplingParams(body["max_tokens"])))
    (result,) = engine.step()
    return {
        "custom_id": custom_id,
        "text": result.text.decode(),
        "finish_reason": result.finish_reason,
        "usage": {"prompt_tokens": len(ids), "completion_tokens": len(result.token_ids)},
    }
