"""Content keys: what stands for the texts of a row where kept answers are looked up."""

from hashlib import blake2b

import msgspec
import pyarrow as pa

from nightjar.pipeline.tasks.fields import Task


class ContentKeys:
    """Makes the content keys of a task that names the columns of a row's content.

    A key is of these columns' values, and of what the task says of requests: with another template
    every row has changed.
    """

    def __init__(self, task: Task) -> None:
        self.columns = tuple(task.source.content or ())
        said = task.request.model_dump(mode="json")
        self._asked = msgspec.json.encode([task.kind, said, self.columns])

    def of(self, rows: pa.RecordBatch) -> list[str | None]:
        """Return the key of each row; None for each where the task names no columns."""
        if not self.columns:
            return [None] * rows.num_rows
        columns = [rows.column(name).to_pylist() for name in self.columns]
        return [self._key(values) for values in zip(*columns, strict=True)]

    def _key(self, values: tuple[object, ...]) -> str:
        written = msgspec.json.encode(values, enc_hook=str)
        return blake2b(self._asked + b"\n" + written, digest_size=16).hexdigest()
