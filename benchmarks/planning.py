"""How fast planners turn text into micro-batches, beside the `tokenizers` library alone.

Rows of about 100 tokens, and of about 1,000, are submitted as one job. One planner process plans
it on all cores, as the library encodes long texts on all of them. Then one planner plans it on one
core, and two at once, each on a core of its own; the database has what they leave. Beside them the
library encodes the same texts on all cores, in one call; it reads and writes nothing. Words are
drawn as often as in natural text (Zipf's law), from 20,000 that the tokenizer itself can spell.
"""

import os
import random
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import tokenizers

from benchmarks.control_plane.requests import submit
from benchmarks.control_plane.services import fresh_database
from benchmarks.harness import DATABASES, Benchmark, Figures, seconds_of
from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.tokenizer import Tokenizer
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.settings import Settings

WORDS = 20_000
LENGTHS = {"100_tokens": 100, "1000_tokens": 1_000}
_OFFSET = 10  # of Zipf's law: the first words are not that frequent


def measure(args: Namespace, folder: Path) -> Figures:
    """Every length, by one and by two planners."""
    directory = ModelDirectory.open(args.model)
    tokenizer = directory.tokenizer()
    library = tokenizers.Tokenizer.from_file(str(args.model / "tokenizer.json"))
    return {
        name: of_length(
            args, folder / name, texts(tokenizer, args.tokens // length, length), library
        )
        for name, length in LENGTHS.items()
    }


def of_length(
    args: Namespace, folder: Path, rows: list[str], library: tokenizers.Tokenizer
) -> Figures:
    """The figures for these texts; each number of planners has a database of its own."""
    mib = sum(len(row.encode()) for row in rows) / 2**20
    encoded: list[int] = []
    alone_s = seconds_of(
        lambda: encoded.extend(
            len(one.ids) for one in library.encode_batch_fast(rows, add_special_tokens=False)
        )
    )
    found: Figures = {
        "rows": len(rows),
        "tokens_a_row": round(sum(encoded) / len(rows), 1),
        "tokenizers": speed(len(rows), mib, alone_s),
    }
    ways = {"all_cores": [set(range(os.cpu_count() or 1))], "one_core": [{0}], "two": [{0}, {1}]}
    for name, cores in ways.items():
        found[name] = speed(len(rows), mib, planned_in(args, folder / name, rows, cores))
    rates = {name: one["rows_per_s"] for name, one in found.items() if isinstance(one, dict)}
    return found | {
        "over_tokenizers": round(rates["all_cores"] / rates["tokenizers"], 2),
        "two_over_one": round(rates["two"] / rates["one_core"], 2),
    }


def speed(rows: int, mib: float, seconds: float) -> Figures:
    """What was done in so many seconds."""
    return {"rows_per_s": round(rows / seconds), "mib_per_s": round(mib / seconds, 2)}


def planned_in(args: Namespace, folder: Path, rows: list[str], cores: list[set[int]]) -> float:
    """Seconds until a job of these rows is planned by processes on these cores."""
    context = get_context("spawn")
    with (
        fresh_database(args.way, folder) as database,
        closing(Store(database.url)) as store,
    ):
        store.migrate()
        submit(store, rows)
        ready = context.Barrier(len(cores) + 1)
        processes = [
            context.Process(target=_plan, args=(database.url, str(args.model), own, ready))
            for own in cores
        ]
        for process in processes:
            process.start()
        ready.wait()
        began = time.monotonic()
        for process in processes:
            process.join()
        seconds = time.monotonic() - began
        if store.backlog.jobs_to_plan() or any(process.exitcode for process in processes):
            raise SystemExit("a planner has not done its part")
    return seconds


def _plan(url: str, model: str, cores: set[int], ready: Barrier) -> None:
    """In its process: plan until nothing waits, as the planner's pass does."""
    os.sched_setaffinity(0, cores)
    settings = Settings.read(model=model, database_url=url)
    with closing(Store(url)) as store:
        planner = Planner(settings, store, PlanningModels.open(settings, store))
        ready.wait()
        while store.backlog.jobs_to_plan():
            while planner.plan_next():
                pass
            time.sleep(planner.pause_s() or 0.0)


def texts(tokenizer: Tokenizer, count: int, tokens: int) -> list[str]:
    """So many texts of about so many tokens."""
    rng = random.Random(0)
    words = list(_words(tokenizer, rng))
    often = list(accumulate(1 / (rank + _OFFSET) for rank in range(len(words))))
    some = " ".join(rng.choices(words, cum_weights=often, k=1_000))
    for_one = len(tokenizer.encode(some)) / 1_000
    size = round(tokens / for_one)
    return [" ".join(rng.choices(words, cum_weights=often, k=size)) for _ in range(count)]


def _words(tokenizer: Tokenizer, rng: random.Random) -> Iterator[str]:
    """Words of one to three tokens."""
    ids = range(len(tokenizer.token_bytes))
    found = 0
    while found < WORDS:
        word = tokenizer.decode(rng.choices(ids, k=rng.choice((1, 1, 2, 2, 3)))).strip()
        if word and "\ufffd" not in word:
            found += 1
            yield word


OPTIONS = {"--tokens": (4_000_000, "of each length")}
BENCHMARK = Benchmark("planning", __doc__, measure, DATABASES, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()
