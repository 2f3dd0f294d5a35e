"""Results as the store gives them back, for the sinks of tables."""

import argparse
import importlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from nightjar.gpu_worker.compute import messages
from nightjar.gpu_worker.worker.answers import Computed, make_result
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import ClaimedRequest, RequestError, ResultRecord
from nightjar.jobs.states import RequestKind
from nightjar.pipeline.tables.keys import Keys
from nightjar.pipeline.tables.sinks import batches
from nightjar.pipeline.tables.sinks.columns import Answers, TaskKind
from nightjar.pipeline.tables.sinks.config import SinkConfig
from nightjar.pipeline.tables.sinks.making import make_sink
from nightjar.pipeline.tables.sinks.sink import Sink, SinkCounts, SinkWriteError

USERS = Keys(pa.schema([("user", pa.string())]))
SHOPS = Keys(pa.schema([("shop", pa.string()), ("day", pa.date32()), ("id", pa.int64())]))
BY = Computed("tiny", "fp32")


def record(index: int, custom_id: str | None, result: Any) -> ResultRecord:
    """What the store gives back for a worker's result."""
    return ResultRecord(
        id=index + 1,
        index=index,
        line=index + 1,
        custom_id=custom_id,
        status_code=result.status_code,
        body=result.body,
        error=result.error,
        prompt_tokens=result.prompt_tokens,
        completion_tokens=result.completion_tokens,
        requested_tokens=result.requested_tokens,
        saved_tokens=result.saved_tokens,
        finish_reason=result.finish_reason,
    )


def generated(
    index: int, custom_id: str, *texts: str, tokens: int = 2, **fields: Any
) -> ResultRecord:
    """An answer of texts, as the worker makes it; `messages` among the fields: of a chat."""
    asked = fields if "messages" in fields else {"prompt": "hi", **fields}
    if len(texts) > 1:
        asked["n"] = len(texts)
    body = validate_body(RequestKind.GENERATE, asked, chat="messages" in fields)
    request = ClaimedRequest(index, index, custom_id, RequestKind.GENERATE, body, [[3, 4, 5]])
    outputs = [messages.Output(text.encode(), tokens, "stop") for text in texts]
    return record(index, custom_id, make_result(request, messages.Generated(1, outputs), BY))


def ranked(
    index: int, custom_id: str, nll: Sequence[float | None], top_n: int | None = None
) -> ResultRecord:
    """A ranking of so many documents."""
    asked = {"query": "q", "documents": ["d"] * len(nll), "top_n": top_n}
    body = validate_body(RequestKind.RANK, asked)
    segments = [[1, 2], *([3] for _ in nll)]
    request = ClaimedRequest(index, index, custom_id, RequestKind.RANK, body, segments)
    answer = messages.Ranked(1, list(nll), [4] * len(nll))
    return record(index, custom_id, make_result(request, answer, BY))


def failed(
    index: int, custom_id: str | None, code: str = "context_exceeded", param: str | None = None
) -> ResultRecord:
    """A failure."""
    error = RequestError(code, f"line {index + 1}: too long", param)
    return ResultRecord(index + 1, index, index + 1, custom_id, 400, None, error, 0, 0, 0, 0, None)


def many(
    count: int, text: str = "an answer of some words ", start: int = 0
) -> Iterator[ResultRecord]:
    """Successes and, one in ten, failures; made as they are asked for."""
    for index in range(start, count):
        if index % 10 == 9:
            yield failed(index, f"user-{index}")
            continue
        choice = {"index": 0, "text": f"{text}{index}", "finish_reason": "stop"}
        body = {"choices": [choice], "model": "tiny"}
        yield ResultRecord(
            index, index, index + 1, f"user-{index}", 200, body, None, 9, 5, 16, 11, "stop"
        )


def sink(
    kind: TaskKind = "generate",
    *,
    keys: Keys = USERS,
    n: int = 1,
    run: str = "run-1",
    environment: dict[str, str] | None = None,
    **config: Any,
) -> Sink:
    """The sink of a `[sink]` table."""
    answers = Answers(kind, many=n > 1)
    checked = SinkConfig.model_validate(config)
    return make_sink(checked, answers, keys, run=run, environment=environment or {})


def ended(opened: Sink, *results: ResultRecord) -> SinkCounts:
    """What checking and writing has counted."""
    opened.check()
    return opened.write(results)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file or a folder."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    found: list[dict[str, Any]] = ds.dataset(path).to_table().to_pylist()
    return found


def left_beside(path: Path) -> list[str]:
    """What else is in the folder of a file."""
    return [one.name for one in path.parent.iterdir() if one.name != path.name]


def write_and_die(
    config: dict[str, Any], environment: dict[str, str], rows: int, point: str, run: str = "new"
) -> None:
    """Write so many results, and be killed at a point: `MODULE:NAME:before|after|NUMBER`.

    A number says which call of the function is the last, and is killed before it begins. Without a
    point the process ends well.
    """
    batches.MOST_ROWS = 100
    opened = sink(run=run, environment=environment, **config)
    opened.check()
    if point:
        place, name, moment = point.split(":")
        _kill_at(importlib.import_module(place), name, moment)
    opened.write(many(rows))


def _kill_at(module: ModuleType, name: str, moment: str) -> None:
    owner: Any = module
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), itertools.count(1)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if moment == "before" or str(next(calls)) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **kwargs)
        if moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, last, deadly)


def main() -> None:
    """Write results into a sink in a process of its own, and tell its cost as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", help="the [sink] table as JSON")
    parser.add_argument("rows", type=int)
    asked = parser.parse_args()
    opened = sink(environment=dict(os.environ), **json.loads(asked.config))
    opened.check()
    began = time.monotonic()
    failure = None
    try:
        opened.write(many(asked.rows))
    except SinkWriteError as error:
        failure = str(error)
    seconds = time.monotonic() - began
    # Not what getrusage says: that begins with the peak of the process that started this one.
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one]
    peak = int(line.split()[1]) >> 10
    told = {"seconds": seconds, "rows_per_s": asked.rows / seconds, "peak_mib": peak}
    sys.stdout.write(json.dumps(told | {"failure": failure}) + "\n")


if __name__ == "__main__":
    main()
