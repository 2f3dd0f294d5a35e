"""Jobs worth looking at, in any state, made by the store as a worker would.

Every text and every number is made up from a fixed seed, so that screenshots are alike.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import (
    ClaimedRequest,
    EncodedRequest,
    MicroBatchRef,
    NewJob,
    NewMicroBatch,
    NewRequest,
    NewResult,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.tables import job, landing, result

MODEL, SMALL = "a" * 64, "b" * 64
WORKER = "gpu-1.night.example:4181:q7f3"
BUCKETS = (128, 256, 512, 1024)
DISHES = ("된장찌개야", "스파게티야", "스테이크야", "짜장면이야", "비빔밥이야", "김치찌개야")
TALKS = (
    (
        "사용자: 안녕 클로바\n클로바: 네 안녕하세요.\n사용자: 너는 취미가 뭐야?\n클로바:",
        " 저는 음악 감상이 취미입니다.",
    ),
    (
        "사용자: 오늘 날씨 어때?\n클로바:",
        " 서울은 맑고 낮 기온은 21도입니다. 저녁에는 쌀쌀하니 겉옷을 챙기세요.",
    ),
    (
        "Summarise the review: dry for a week of rain, but the zip stuck twice.\n",
        " Waterproof for a week; the zip sticks.",
    ),
    (
        "상품명을 한 줄로 소개해 줘: 손으로 빚은 백자 머그\n",
        " 매일 아침을 따뜻하게 여는, 손으로 빚은 백자 머그.",
    ),
)

Make = Callable[[int, random.Random], dict[str, object]]
Answer = Callable[[ClaimedRequest, random.Random], NewResult]


@dataclass(frozen=True)
class Work:
    """A job to be made: how its rows are asked, and how many of them have landed."""

    make: Make
    rows: int
    answer: Answer
    landed: float = 1.0  # share of the planned micro-batches
    planned: float = 1.0  # share of the rows
    held: int = 0  # micro-batches that a worker holds
    each: int = 25
    took: timedelta = timedelta(hours=2)
    ago: timedelta = timedelta(hours=2)
    tenant: str = "default"
    metadata: dict[str, str] | None = None
    fingerprint: str = MODEL
    model: str = "hyperclova-6.9b"


def talk(index: int, chosen: random.Random) -> dict[str, object]:
    prompt, _ = TALKS[index % len(TALKS)]
    return {"prompt": prompt, "max_tokens": chosen.choice([128, 256, 256, 512])}


def ranking(index: int, chosen: random.Random) -> dict[str, object]:
    query = "나는 어렸을 때부터 한식을 좋아했어. 지금도 내가 가장 좋아하는 음식은"
    return {"query": query, "documents": list(DISHES), "return_documents": True}


def review(index: int, chosen: random.Random) -> dict[str, object]:
    content = f"Read review {index} and answer in JSON: sentiment, topic, stars."
    return {"prompt": content, "max_tokens": 64}


def _lengths(request: ClaimedRequest, chosen: random.Random) -> tuple[int, int, int]:
    """Prompt, requested and generated tokens: people ask for far more than is written."""
    asked = int(request.body["max_tokens"])
    made = min(asked, max(3, int(chosen.lognormvariate(3.4, 0.5))))
    return min(1000, int(chosen.lognormvariate(4.9, 0.7))), asked, made


def _generated(request: ClaimedRequest, chosen: random.Random, text: str) -> NewResult:
    prompt, asked, made = _lengths(request, chosen)
    key = "message" if "messages" in request.body else "text"
    said = {"role": "assistant", "content": text} if key == "message" else text
    choice = {"index": 0, key: said, "logprobs": None, "finish_reason": "stop"}
    body = {"id": f"cmpl-{request.id}", "object": "text_completion", "choices": [choice]}
    return NewResult(
        request.id,
        200,
        body,
        prompt_tokens=prompt,
        completion_tokens=made,
        requested_tokens=asked,
        saved_tokens=asked - made,
        finish_reason="stop",
    )


def say(request: ClaimedRequest, chosen: random.Random) -> NewResult:
    return _generated(request, chosen, TALKS[request.index % len(TALKS)][1])


def judge(request: ClaimedRequest, chosen: random.Random) -> NewResult:
    said = {
        "sentiment": chosen.choice(["positive", "negative", "mixed"]),
        "topic": chosen.choice(["delivery", "quality", "price", "맛"]),
        "stars": chosen.randint(1, 5),
    }
    return _generated(request, chosen, json.dumps(said, ensure_ascii=False))


def rank(request: ClaimedRequest, chosen: random.Random) -> NewResult:
    scores = {0: 3.82, 4: 4.11, 5: 4.4, 1: 5.92, 3: 6.2, 2: 6.42}
    found = [
        {
            "index": index,
            "relevance_score": 2.718**-nll,
            "mean_nll": nll,
            "document": {"text": DISHES[index]},
        }
        for index, nll in scores.items()
    ]
    body = {"id": f"rerank-{request.id}", "object": "rerank", "results": found}
    return NewResult(request.id, 200, body, prompt_tokens=40 + chosen.randint(0, 60))


def failing(request: ClaimedRequest, chosen: random.Random) -> NewResult:
    luck = chosen.random()
    if luck < 0.09:
        return NewResult.failure(
            request.id,
            "context_exceeded",
            "the prompt has 2,310 tokens and max_tokens is 256; the model takes 2,048 together",
            param="body.max_tokens",
        )
    if luck < 0.11:
        message = "the compute process was ended by SIGSEGV while this request was computed alone"
        return NewResult.failure(request.id, "compute_crashed", message, status=500)
    return say(request, chosen)


def make(store: Store, work: Work, seed: int = 7) -> str:
    """A job as far as the work says; returns its id."""
    chosen = random.Random(seed)
    kind = RequestKind.RANK if work.make is ranking else RequestKind.GENERATE
    rows = [
        NewRequest(n, n + 1, f"row-{n:05}", kind, validate_body(kind, work.make(n, chosen)))
        for n in range(work.rows)
    ]
    new = NewJob(work.model, merge_equal=False, tenant=work.tenant, metadata=work.metadata or {})
    with store.jobs.submit(new) as arriving:
        arriving.add(rows)
    refs = _plan(store, arriving.job_id, work, kind, chosen)
    done = refs[: round(len(refs) * work.landed)]
    for ref in done:
        _compute(store, ref, work, chosen)
    for ref in refs[len(done) : len(done) + work.held]:
        store.leases.claim(ref.id, ref.epoch, WORKER, ref.fingerprint)
    _spread(store, arriving.job_id, work)
    return arriving.job_id


def _plan(
    store: Store, job_id: str, work: Work, kind: RequestKind, chosen: random.Random
) -> list[MicroBatchRef]:
    count = round(work.rows * work.planned)
    queued = [one.id for one in store.backlog.queued_requests(job_id, count)] if count else []
    groups = [queued[at : at + work.each] for at in range(0, len(queued), work.each)]
    batches = [
        NewMicroBatch(kind, chosen.choices(BUCKETS, (3, 6, 3, 1))[0], own, 180 * len(own))
        for own in groups
    ]
    encoded = [
        EncodedRequest(id_, [[1, 2]] * (3 if kind is RequestKind.RANK else 1)) for id_ in queued
    ]
    return store.planning.save_plan(job_id, encoded, batches, fingerprint=work.fingerprint)


def _compute(store: Store, ref: MicroBatchRef, work: Work, chosen: random.Random) -> None:
    claimed = store.leases.claim(ref.id, ref.epoch, WORKER, ref.fingerprint)
    assert claimed is not None
    answers = [work.answer(request, chosen) for request in claimed.requests]
    assert store.leases.finish(claimed.id, claimed.epoch, WORKER, answers)


def _spread(store: Store, job_id: str, work: Work) -> None:
    """As if the work had taken its time: faster in the middle of the night."""
    begun = datetime.now(UTC) - work.ago
    with store.database.reading() as connection:
        tokens: Sequence[int] = connection.scalars(
            sa.select(landing.c.token).where(landing.c.job_id == job_id).order_by(landing.c.first)
        ).all()
        over = connection.scalar(sa.select(job.c.finished_at).where(job.c.id == job_id))

    def work_(connection: sa.Connection) -> None:
        for place, token in enumerate(tokens, 1):
            share = place / len(tokens)
            at = begun + work.took * (0.7 * share + 0.3 * share**3)
            connection.execute(
                sa.update(result).where(result.c.landing == token).values(created_at=at)
            )
        values: dict[str, object] = {"created_at": begun - timedelta(minutes=4)}
        if tokens:
            values["started_at"] = begun
        if over is not None:
            values["finished_at"] = begun + work.took
        connection.execute(sa.update(job).where(job.c.id == job_id).values(values))

    store.database.write(work_)
