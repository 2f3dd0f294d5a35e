"""Computes a sample of earlier answers again, alone and in company, and compares them."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nightjar import __version__
from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import without_cache
from nightjar.pipeline.embedded.line_files import LineFiles
from nightjar.pipeline.embedded.run import RunArguments, run
from nightjar.pipeline.embedded.sampling_results import SampledRow, SampledRows, results_by_id
from nightjar.pipeline.embedded.summary import Listener
from nightjar.pipeline.embedded.workdir import UsageError

# Of an answer: when and for which request it was computed, and what it cost.
_OF_THE_RUN = frozenset(
    {"id", "created", "receipt", "reused", "reused_documents", "usage", "model"}
)
_ALONE = {"NIGHTJAR_MICRO_BATCH_REQUESTS": "1", "NIGHTJAR_WORKER_THREADS": "1"}
_NOT_REUSED = {"NIGHTJAR_REUSE_RESULTS": "false"}
_NAMED = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """A row whose answer differs.

    alone, in_company: the fields that differ from the file's, empty where none does.
    """

    custom_id: str
    alone: tuple[str, ...]
    in_company: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What became of the sample.

    rows: successes in the file; sampled: those of them that were computed again, in `precision`.
    left_out: by reason.  receipts: rows with a receipt; other_receipts: by what their receipts
    name otherwise than this model and version.
    """

    rows: int
    sampled: int
    precision: str
    left_out: Mapping[str, int]
    receipts: int
    other_receipts: Mapping[str, int]
    differences: tuple[Difference, ...]

    @property
    def is_same(self) -> bool:
        """Whether every answer is the same."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """Return all of it for programs."""
        return {**asdict(self), "is_same": self.is_same}

    def lines(self) -> list[str]:
        """Return the report for people."""
        made = [
            f"{self.sampled} of {self.rows} rows were computed again in {self.precision}, alone "
            "and in company"
        ]
        made += [f"{count} rows were left out: {why}" for why, count in self.left_out.items()]
        for what, count in self.other_receipts.items():
            made.append(f"{count} receipts name {what}")
        for one in self.differences[:_NAMED]:
            places = [("alone", one.alone), ("in company", one.in_company)]
            found = "; ".join(f"{where}: {', '.join(f)}" for where, f in places if f)
            made.append(f"{one.custom_id!r} differs {found}")
        if len(self.differences) > _NAMED:
            made.append(f"{len(self.differences) - _NAMED} more rows differ")
        word = "all are the same" if self.is_same else f"{len(self.differences)} differ"
        return [*made, word]


def recompute(model: Path, sample: SampledRows, tell: Callable[[str], None]) -> Recomputed:
    """Compute the sample again on this machine, with the model in this directory.

    tell: called with what is being done.

    Raises:
        UsageError: The model cannot be opened, or no row can be computed again.
        RunError: A run cannot continue.
    """
    rows, precision, left_out = comparable(sample)
    plain, cache = without_cache(precision)
    folder = Path(tempfile.mkdtemp(prefix="nightjar-verify-"))
    try:
        source = folder / "sample.jsonl"
        source.write_bytes(b"\n".join(row.line for row in rows) + b"\n")
        found = {}
        for name, settings in (("in company", {}), ("alone", _ALONE)):
            tell(f"{len(rows)} rows {name}")
            out = folder / f"{name.replace(' ', '-')}.jsonl"
            with _environment(settings | _NOT_REUSED | {"NIGHTJAR_KV_CACHE_DTYPE": cache}):
                arguments = RunArguments(
                    work=LineFiles(source, out),
                    model=model,
                    dtype=plain.partition("+")[0],
                    accept_any_model=True,
                )
                run(arguments, Listener())
            found[name] = results_by_id(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    receipts = [row.body["receipt"] for row in rows if isinstance(row.body.get("receipt"), dict)]
    return Recomputed(
        rows=sample.of,
        sampled=len(rows),
        precision=precision,
        left_out=left_out,
        receipts=len(receipts),
        other_receipts=_others(receipts, ModelDirectory.open(model)),
        differences=compare(rows, found["alone"], found["in company"]),
    )


def compare(
    rows: Sequence[SampledRow],
    alone: Mapping[str, Mapping[str, Any]],
    in_company: Mapping[str, Mapping[str, Any]],
) -> tuple[Difference, ...]:
    """Return the rows whose answers differ; alone, in_company: bodies by custom_id."""
    differences = [
        Difference(
            row.custom_id,
            _differing(row.body, alone.get(row.custom_id)),
            _differing(row.body, in_company.get(row.custom_id)),
        )
        for row in rows
    ]
    return tuple(one for one in differences if one.alone or one.in_company)


def comparable(sample: SampledRows) -> tuple[list[SampledRow], str, dict[str, int]]:
    """Return the rows of the most frequent precision, and how many are left out and why."""
    left_out: Counter[str] = Counter()
    if sample.without_line:
        left_out["the file of requests has no such line"] = sample.without_line
    rows = []
    for row in sample.rows:
        if b'"prompt_vector"' in row.line or b'"adapter"' in row.line:
            left_out["they name prompt vectors or an adapter"] += 1
        elif not isinstance(row.body.get("precision"), str) or row.body["precision"] == "fake":
            left_out["they name no precision that can be computed"] += 1
        else:
            rows.append(row)
    if not rows:
        raise UsageError(f"no sampled row can be computed again: {dict(left_out)}")
    precision, _ = Counter(row.body["precision"] for row in rows).most_common(1)[0]
    others = [row for row in rows if row.body["precision"] != precision]
    if others:
        left_out[f"their precision is not {precision}"] = len(others)
    return [row for row in rows if row.body["precision"] == precision], precision, dict(left_out)


def _differing(expected: Mapping[str, Any], found: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the fields of an answer that differ, scores with the largest distance."""
    if found is None:
        return ("no answer",)
    names = sorted((expected.keys() | found.keys()) - _OF_THE_RUN)
    differing = [name for name in names if expected.get(name) != found.get(name)]
    if "results" in differing:
        differing[differing.index("results")] = _scores(expected["results"], found.get("results"))
    return tuple(differing)


def _scores(expected: Sequence[Mapping[str, Any]], found: Any) -> str:  # noqa: ANN401 - JSON
    """Say how far scores are apart."""
    theirs = {one["index"]: one["mean_nll"] for one in found or ()}
    ours = {one["index"]: one["mean_nll"] for one in expected}
    if ours.keys() != theirs.keys():
        return "results (other documents)"
    distance = max((abs(ours[i] - theirs[i]) for i in ours), default=math.nan)
    return f"results (scores by {distance:.2g})"


def _others(receipts: Sequence[Mapping[str, Any]], directory: ModelDirectory) -> dict[str, int]:
    """Count the receipts that name another model or version."""
    counts = {
        "another model": sum(one.get("model") != directory.fingerprint for one in receipts),
        "another version of Nightjar": sum(one.get("version") != __version__ for one in receipts),
    }
    return {what: count for what, count in counts.items() if count}


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while; this process has no other thread that reads them."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
