"""An export: parts in parallel processes, each tried again where it may help, then the manifest.

Whatever ends it, what is whole stays, and the same call goes on with the rest. Readers see no part
of a file, and no manifest before every file is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import msgspec

from nightjar.jobs.errors import JobError, StoreUnavailableError
from nightjar.jobs.store import Store
from nightjar.pipeline.exports.plan import MANIFEST, NOTES, Manifest, Plan, Written
from nightjar.pipeline.exports.target import FolderTarget, Target, target_of
from nightjar.pipeline.exports.writing import IncompleteError, write_part

ATTEMPTS = 3
PAUSE_S = 1.0  # after the first failure; four times as long after the next


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an export is."""

    parts: int
    of: int
    rows: int


class ExportError(Exception):
    """An export did not come to its end; the message says why, and what to do."""


def export(
    store: Store,
    open_store: Callable[[], Store],
    plan: Plan,
    place: str,
    processes: int,
    tell: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Write what is missing of an export, and note at the job that it is exported.

    Args:
        store: Where the job is.
        open_store: Opens the same in another process; it can be pickled.
        plan: What is written.
        place: The folder or the URL.
        processes: That write at the same time.
        tell: Is told after each part.

    Raises:
        ExportError: A part cannot be written, or the job was changed meanwhile.
        TargetError: The target cannot be used.
    """
    target = target_of(place)
    with target.held():
        old = _manifest(target)
        manifest = plan.manifest(_parts(open_store, plan, place, processes, tell))
        with target.made(MANIFEST) as path:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        # Not before: a job that is noted may be purged.
        ended = plan.job.finished_at
        if ended is None or not store.jobs.note_exported(plan.job.id, ended):
            target.remove(MANIFEST)
            raise ExportError("rows of the job are retried since: export it again when it is over")
        for one in old.files if old is not None and old.export != plan.export else ():
            target.remove(one.name)
            target.remove(f"{NOTES}/{one.name}.json")
    return manifest


def _manifest(target: Target) -> Manifest | None:
    try:
        found = target.read(MANIFEST)
    except OSError as error:
        raise ExportError(f"{target.name} cannot be read: {_first_line(error)}") from error
    if found is None:
        return None
    try:
        return msgspec.json.decode(found, type=Manifest)
    except msgspec.DecodeError as error:
        raise ExportError(
            f"{target.name}{MANIFEST} is not of an export; name another place"
        ) from error


def _parts(
    open_store: Callable[[], Store],
    plan: Plan,
    place: str,
    processes: int,
    tell: Callable[[Progress], None],
) -> list[Written]:
    written: dict[int, Written] = {}
    work = partial(_written, open_store, place, plan)
    for number, found in _done(work, len(plan.parts), processes):
        if isinstance(found, str):
            raise ExportError(
                f"{plan.parts[number].name}: {found}. {len(written)} of {len(plan.parts)} files "
                "are written; run the same command again to write the others"
            )
        written[number] = found
        tell(Progress(len(written), len(plan.parts), sum(one.rows for one in written.values())))
    return [written[number] for number in sorted(written)]


def _done(
    work: Callable[[int], Written | str], parts: int, processes: int
) -> Iterator[tuple[int, Written | str]]:
    """Yield what became of each part; those that have begun come to their end in any case."""
    if processes == 1:
        yield from ((number, work(number)) for number in range(parts))
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(work, number): number for number in range(parts)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()


def _written(open_store: Callable[[], Store], place: str, plan: Plan, number: int) -> Written | str:
    """Write a part, maybe in a process of its own; returns why it cannot be written."""
    target = target_of(place)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with closing(open_store()) as store:
                return write_part(store, target, plan, plan.parts[number])
        except (OSError, StoreUnavailableError) as error:
            # A second later a full disk is still full, but a connection may be back.
            is_local = isinstance(target, FolderTarget) and isinstance(error, OSError)
            if is_local or attempt == ATTEMPTS:
                return _first_line(error)
        except (JobError, IncompleteError) as error:
            return str(error)
        time.sleep(PAUSE_S * 4 ** (attempt - 1))
    raise AssertionError("the last attempt returns")


def _first_line(error: Exception) -> str:
    told = getattr(error, "strerror", None) or str(error)
    return str(told).partition("\n")[0]
