"""Results as JSON lines: one object a row, with the same columns as the other sinks."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from nightjar.pipeline.tables.keys import to_json
from nightjar.pipeline.tables.sinks.sink import SinkRefusedError

_HEAD_BYTES = 64 << 20  # the first line of a file of ours may be an answer of megabytes


class JsonlFile:
    """Writes one file of JSON lines."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._names = schema.names
        self._encoder = msgspec.json.Encoder()
        self._stream = path.open("wb")

    def write(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a batch."""
        names = self._names
        rows = zip(*(to_json(column) for column in batch.columns), strict=True)
        lines = [dict(zip(names, row, strict=True)) for row in rows]
        self._stream.write(self._encoder.encode_lines(lines))

    def close(self) -> None:
        """Finish the file."""
        self._stream.close()


def check_jsonl(path: Path, names: Sequence[str]) -> None:
    """Refuse to replace a file that is not empty and whose first line has other fields.

    Raises:
        SinkRefusedError: It is such a file.
        OSError: It cannot be read.
    """
    with path.open("rb") as stream:
        line = stream.readline(_HEAD_BYTES)
    if not line:
        return
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or list(found) != list(names):
        raise SinkRefusedError(
            f"{path} holds something else than results of this task ({', '.join(names)}): move it "
            "away, name another file, or set overwrite = true to replace it"
        )
