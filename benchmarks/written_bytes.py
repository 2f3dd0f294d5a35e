"""What PostgreSQL writes for a row: bytes of its write-ahead log by step, and of its tables.

One process submits a job, plans it, dispatches it, and claims and finishes its micro-batches, each
by the store's own calls. Prompts and answers have 400 characters, most of them of three bytes, and
200 tokens. `--texts` names a file of texts, one a line; else they are drawn. A checkpoint comes
first, so that images of whole pages are counted as at the beginning of a night.

What is stored is without the token ids of rows that have ended: vacuum gives their room back.
"""

import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

import sqlalchemy as sa

from benchmarks.control_plane.requests import submit
from benchmarks.control_plane.services import fresh_database
from benchmarks.drawn_texts import drawn_texts
from benchmarks.harness import Benchmark, Figures
from benchmarks.statement_costs import counted
from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.asked import without_texts
from nightjar.jobs.records import EncodedRequest, MicroBatchRef, NewMicroBatch, NewResult
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.database import database_url

EACH = 128
"""Requests of a micro-batch, as the settings have it."""
CHUNK = 2_048
CHARACTERS = 400
TOKENS = 200
MODEL = "f" * 64
OWNER = "worker"
_PARTITION = re.compile(r"_p\d+$")  # that of today holds all rows
_SOON_DELETED = ("micro_batch_tokens",)
_WRITTEN = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
_SIZES = """
SELECT relname, pg_total_relation_size(oid), pg_indexes_size(oid) FROM pg_class
WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace
"""
_HOT = """
SELECT relname, n_tup_hot_upd::float / n_tup_upd FROM pg_stat_user_tables WHERE n_tup_upd > 1000
"""


class Log:
    """Bytes of the write-ahead log, by the step that wrote them."""

    def __init__(self, admin: sa.Connection) -> None:
        self._admin = admin
        self.bytes: dict[str, int] = defaultdict(int)

    @contextmanager
    def of(self, step: str) -> Iterator[None]:
        """Count what is written in the block."""
        before = self._position()
        yield
        self.bytes[step] += self._position() - before

    def _position(self) -> int:
        return int(self._admin.exec_driver_sql(_WRITTEN).scalar_one())


def measure(args: Namespace, folder: Path) -> Figures:
    """Bytes of a row."""
    with (
        fresh_database("postgresql", folder) as database,
        closing(Store(database.url)) as store,
        administering(database.url) as admin,
    ):
        store.migrate()
        admin.exec_driver_sql("CHECKPOINT")
        log = Log(admin)
        texts = _texts(args.texts, args.rows)
        with counted(store) as costs:
            with log.of("submit"):
                job_id = submit(store, texts, merge_equal=False)
            compute(store, log, job_id, args.model, texts)
        tables = {
            _PARTITION.sub("", name): {
                "bytes": round(size / args.rows, 1),
                "indexes": round(indexes / args.rows, 1),
            }
            for name, size, indexes in admin.exec_driver_sql(_SIZES)
            if size > 4 * args.rows
        }
        hot = {
            _PARTITION.sub("", name): round(share, 3) for name, share in admin.exec_driver_sql(_HOT)
        }
    steps = {name: round(count / args.rows, 1) for name, count in log.bytes.items()}
    stored = sum(table["bytes"] for name, table in tables.items() if name not in _SOON_DELETED)
    return {
        "rows": args.rows,
        "text_bytes": round(sum(len(text.encode()) for text in texts) / len(texts), 1),
        "log_bytes_per_row": steps | {"all": round(sum(steps.values()), 1)},
        "stored_bytes_per_row": round(stored, 1),
        "tables": tables,
        "hot_updates": hot,
        "statements": costs.per_row(args.rows),
    }


def compute(store: Store, log: Log, job_id: str, model: Path, texts: list[str]) -> None:
    """Plan, dispatch, claim and finish a job."""
    tokenizer = ModelDirectory.open(model).tokenizer()
    while queued := store.backlog.queued_requests(job_id, CHUNK):
        ids = [one.id for one in queued]
        tokens = tokenizer.encode_batch([one.body["prompt"] for one in queued])
        with log.of("plan"):
            refs = store.planning.save_plan(
                job_id,
                [
                    EncodedRequest(one.id, [found[:TOKENS]], asked=without_texts(one.body))
                    for one, found in zip(queued, tokens, strict=True)
                ],
                [
                    NewMicroBatch(RequestKind.GENERATE, 256, ids[at : at + EACH], TOKENS * EACH)
                    for at in range(0, len(ids), EACH)
                ],
                fingerprint=MODEL,
            )
        with log.of("dispatch"):
            store.planning.mark_dispatched(refs)
        for ref in refs:
            answer(store, log, ref, texts)


def answer(store: Store, log: Log, ref: MicroBatchRef, texts: list[str]) -> None:
    """Claim and finish a micro-batch; each answer is as long as a prompt."""
    with log.of("claim"):
        claimed = store.leases.claim(ref.id, ref.epoch, OWNER, MODEL)
    assert claimed is not None
    results = [
        NewResult(
            one.id,
            200,
            {
                "choices": [
                    {"index": 0, "text": texts[one.id % len(texts)], "finish_reason": "length"}
                ]
            },
            prompt_tokens=TOKENS,
            completion_tokens=100,
            requested_tokens=100,
            finish_reason="length",
        )
        for one in claimed.requests
    ]
    with log.of("finish"):
        store.leases.finish(ref.id, ref.epoch, OWNER, results)


def _texts(path: Path, count: int) -> list[str]:
    if path == Path():
        return list(drawn_texts(count, CHARACTERS))
    with path.open(encoding="utf-8") as lines:
        texts = [line.rstrip("\n") for line in islice(lines, count)]
    if len(texts) < count:
        raise SystemExit(f"{path} has {len(texts)} lines, and --rows asks for {count}")
    return texts


@contextmanager
def administering(url: str) -> Iterator[sa.Connection]:
    """A connection each of whose statements is a transaction."""
    engine = sa.create_engine(
        database_url(url), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        yield connection


OPTIONS = {
    "--rows": (50_000, "of the job"),
    "--texts": (Path(), "a file of texts, one a line; drawn unless given"),
}
ABOUT: Figures = {"characters": CHARACTERS}
BENCHMARK = Benchmark("written_bytes", __doc__, measure, options=OPTIONS, about=ABOUT)

if __name__ == "__main__":
    BENCHMARK.main()
