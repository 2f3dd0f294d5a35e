"""The sink of a task: its places, which are relative to the task file, and its kind of answers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from nightjar.pipeline.tables.sinks.columns import Answers
from nightjar.pipeline.tables.sinks.config import OBJECT_STORES, SAME, SinkConfig
from nightjar.pipeline.tasks.errors import TaskError
from nightjar.pipeline.tasks.fields import Task

_FROM_ENVIRONMENT = "env:"


@dataclass(frozen=True, slots=True)
class PlacedSink:
    """A sink with absolute places.

    environment: Where its URL is looked up.
    """

    config: SinkConfig
    environment: Mapping[str, str]

    def overwriting(self) -> "PlacedSink":
        """Return the same with `overwrite = true`."""
        return replace(self, config=self.config.model_copy(update={"overwrite": True}))


def placed_sink(config: SinkConfig, folder: Path, environment: Mapping[str, str]) -> PlacedSink:
    """Return the sink with places relative to the folder of the task file."""
    changed: dict[str, object] = {}
    for name in ("jsonl", "parquet"):
        path = getattr(config, name)
        if path is not None:
            changed[name] = _placed(path, folder)
    if config.sql is None:
        if config.errors != SAME:
            changed["errors"] = _placed(config.errors, folder)
        return PlacedSink(config.model_copy(update=changed), environment)
    url = config.sql.url
    name = url.removeprefix(_FROM_ENVIRONMENT)
    if name != url:
        return PlacedSink(
            config, {**environment, name: _placed_url(environment.get(name, ""), folder)}
        )
    sql = config.sql.model_copy(update={"url": _placed_url(url, folder)})
    return PlacedSink(config.model_copy(update={"sql": sql}), environment)


def check_apart(task: Task, folder: Path, outs: Iterable[str]) -> None:
    """Refuse answers that would replace the rows, or be read as rows by the next run.

    Raises:
        TaskError: A file of answers is the source, or in its folder.
    """
    given = task.source
    source = given.jsonl or given.parquet or (given.csv.path if given.csv is not None else None)
    if source is None or source.startswith(OBJECT_STORES):
        return
    rows = (folder / Path(source).expanduser()).resolve()
    for out in outs:
        answers = Path(out).resolve()
        if answers == rows:
            raise TaskError(f"the answers would replace the source {source}; name another place")
        if answers.is_relative_to(rows):
            raise TaskError(
                f"the answers would be in the folder of the source, {source}, and the next run "
                "would read them; name another place"
            )


def local_outs(config: SinkConfig) -> list[str]:
    """Return the files and folders of this machine that a sink writes."""
    paths = [config.jsonl or config.parquet]
    if config.sql is None and config.errors != SAME:
        paths.append(config.errors)
    return [path for path in paths if path is not None and not path.startswith(OBJECT_STORES)]


def answers_of(task: Task) -> Answers:
    """Return what decides about the columns of a task's answers."""
    asked = task.parameters.get("n", 1)
    return Answers(task.kind, many=task.kind in ("generate", "chat") and asked != 1)


def is_there(config: SinkConfig) -> bool:
    """Whether local files of the sink are there; of other sinks this is taken for granted."""
    return all(Path(path).exists() for path in local_outs(config))


def _placed(path: str, folder: Path) -> str:
    if path.startswith(OBJECT_STORES):
        return path
    # A path that ends with a slash is a folder, and pathlib drops the slash.
    return f"{folder / Path(path).expanduser()}{'/' if path.endswith('/') else ''}"


def _placed_url(url: str, folder: Path) -> str:
    """Return the URL of a SQLite file with the file's whole path; other URLs as they are."""
    try:
        parts = make_url(url)
    except (ArgumentError, ValueError):
        return url  # the sink says what is wrong with it
    if parts.get_backend_name() != "sqlite" or parts.database in (None, "", ":memory:"):
        return url
    return parts.set(database=str(folder / str(parts.database))).render_as_string(
        hide_password=False
    )
