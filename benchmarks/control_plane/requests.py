"""The requests that systems are given: prompts of about 100 tokens, no two alike."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import EncodedRequest, MicroBatchRef, NewJob, NewMicroBatch, NewRequest
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store

PROMPT_TOKENS = 100
MAX_TOKENS = 16
_BODIES = 2_000  # texts that are told apart by their numbers
_KOREAN = (
    "오늘 저녁 날씨가 정말 좋아서 친구와 함께 강가를 걸었다 그리고 따뜻한 국물이 생각나 식당에 갔다"
)
_ENGLISH = "the quick brown fox jumps over a lazy dog while seven wizards boil 12 quarts of water"
_WORDS = [*_KOREAN.split(), *_ENGLISH.split()]


def prompts(model: Path, count: int, seed: int = 0) -> Iterator[str]:
    """`count` prompts whose token counts lie around PROMPT_TOKENS."""
    tokenizer = ModelDirectory.open(model).tokenizer()
    rng = random.Random(seed)
    bodies = []
    for _ in range(min(_BODIES, count)):
        text = " ".join(rng.choices(_WORDS, k=PROMPT_TOKENS))
        number = len(tokenizer.encode("00000000 "))
        bodies.append(tokenizer.decode(tokenizer.encode(text)[: PROMPT_TOKENS - number]))
    for index in range(count):
        yield f"{index:08d} {bodies[index % len(bodies)]}"


def write_jobs(folder: Path, model: Path, count: int, each: int) -> list[Path]:
    """Files of batch lines, `each` of them a job of so many requests."""
    texts = enumerate(prompts(model, count))
    files = [folder / f"job-{number}.jsonl" for number in range(-(-count // each))]
    for path in files:
        with path.open("w", encoding="utf-8") as stream:
            for index, text in islice(texts, each):
                stream.write(batch_line(f"row-{index}", "/v1/completions", body(text)))
    return files


def body(prompt: str, max_tokens: int = MAX_TOKENS) -> dict[str, object]:
    """What is asked for."""
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}


def batch_line(custom_id: str, url: str, body: Mapping[str, object]) -> str:
    """A line of a batch file."""
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(line, ensure_ascii=False) + "\n"


def submit(store: Store, texts: Iterable[str], max_tokens: int = MAX_TOKENS, **job: Any) -> str:
    """Put a job of these prompts into the store, past the API; returns its id.

    job: fields of NewJob.
    """
    kind = RequestKind.GENERATE
    with store.jobs.submit(NewJob("demo", **job)) as submission:
        submission.add(
            NewRequest(n, n + 1, f"row-{n}", kind, validate_body(kind, body(text, max_tokens)))
            for n, text in enumerate(texts)
        )
    return submission.job_id


def plan(
    store: Store, job_id: str, count: int, each: int = 1, fingerprint: str = ""
) -> list[MicroBatchRef]:
    """Make micro-batches of `each` of a job's first `count` requests, as the planner does."""
    ids = [request.id for request in store.backlog.queued_requests(job_id, count)]
    micro_batches = [
        NewMicroBatch(RequestKind.GENERATE, 32, ids[start : start + each], 19 * each)
        for start in range(0, len(ids), each)
    ]
    encoded = [EncodedRequest(id_, [[1, 2, 3]]) for id_ in ids]
    return store.planning.save_plan(job_id, encoded, micro_batches, fingerprint=fingerprint)
