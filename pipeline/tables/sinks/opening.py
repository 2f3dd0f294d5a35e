"""From the `[sink]` table of a task file to a sink that can be written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nightjar.pipeline.tables.keys import Keys
from nightjar.pipeline.tables.sinks.config import SinkConfig
from nightjar.pipeline.tables.sinks.sink import Sink

TaskKind = Literal["generate", "chat", "rank", "score"]


@dataclass(frozen=True, slots=True)
class Answers:
    """What decides about the columns of a task's answers."""

    kind: TaskKind
    many: bool = False  # generate and chat: more than one answer a row, so that columns are lists


def open_sink(
    config: SinkConfig, answers: Answers, keys: Keys, *, run: str, environment: Mapping[str, str]
) -> Sink:
    """The sink that the configuration describes; nothing is opened or changed yet.

    Args:
        config: The `[sink]` table.
        answers: The kind of the task.
        keys: The key columns of its rows.
        run: The same for every `write` of the same results, another one when the results may
            differ: such as the job's id with the moment at which it ended.
        environment: Where `env:NAME` is looked up.

    Raises:
        SinkRefusedError: The options contradict the key columns, or the URL cannot be used.
    """
    raise NotImplementedError
