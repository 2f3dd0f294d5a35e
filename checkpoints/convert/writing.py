"""Writes the converted model: safetensors files of bounded size, one tensor in memory.

Each file is complete or absent under its name.  A manifest holds what was read and the digest of
what was written, so that a conversion that was interrupted continues after its last whole file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nightjar.checkpoints.convert.arrays import Array, Recipe
from nightjar.checkpoints.disk import Range, ReadAhead, write_soon
from nightjar.checkpoints.errors import CheckpointError

MANIFEST = "conversion.json"
FILE_BYTES = 4 << 30
"""A file ends before the tensor that would make it larger; a larger tensor has one of its own."""
_WRITE_BYTES = 16 << 20
_READ_AHEAD_BYTES = 256 << 20
"""The disk reads the sources of so many bytes of tensors before they are needed."""
_AHEAD_BYTES = 128 << 20
"""Tensors in memory together; a larger one is built when those before it have left the memory."""
_BUILDERS = 2
"""Tensors that are built at the same time: building takes longer than writing."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are written, and the bytes of all tensors."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of weights."""

    name: str
    recipes: tuple[Recipe, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(recipe.size_bytes for recipe in self.recipes)


def plan_files(recipes: Sequence[Recipe]) -> list[PlannedFile]:
    """Share the tensors among files of at most FILE_BYTES, in their order."""
    groups: list[list[Recipe]] = [[]]
    size = 0
    for recipe in recipes:
        if groups[-1] and size + recipe.size_bytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(recipe)
        size += recipe.size_bytes
    if len(groups) == 1:
        return [PlannedFile("model.safetensors", tuple(groups[0]))]
    return [
        PlannedFile(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


class Writer:
    """Writes into a folder, which is new or holds the same conversion, not yet finished.

    description: what decides the content, such as the sources' stamps and the options.  It is
    compared with that of the conversion that was interrupted.
    """

    def __init__(self, folder: Path, description: dict[str, Any]) -> None:
        self._folder = folder
        self._description = description
        self._digests: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        path = self._folder / MANIFEST
        if path.is_file():
            found = _read_manifest(path)
            if found.get("finished"):
                raise CheckpointError(f"{self._folder}: is converted already; choose another --out")
            changed = [
                key
                for key, value in self._description.items()
                if found["made_of"].get(key) != value
            ]
            if changed:
                raise CheckpointError(
                    f"{self._folder}: holds another conversion, which was not finished: "
                    f"{', '.join(changed)} changed; remove the folder or choose another --out"
                )
            self._digests = dict(found["files"])
        elif self._folder.exists() and any(self._folder.iterdir()):
            raise CheckpointError(f"{self._folder}: exists and is not empty; choose another --out")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._save(finished=False)
        except OSError as error:
            raise CheckpointError(f"{self._folder}: cannot be written: {error.strerror}") from error

    def _save(self, *, finished: bool) -> None:
        content = {
            "made_of": self._description,
            "files": self._digests,
            "finished": finished,
        }
        self.write_small(MANIFEST, json.dumps(content, indent=2).encode())

    def write_small(self, name: str, data: bytes) -> None:
        """Write a small file as a whole."""
        partial = self._folder / f"{name}.partial"
        partial.write_bytes(data)
        partial.replace(self._folder / name)

    def write_file(self, planned: PlannedFile, progress: Callable[[int], None]) -> None:
        """Write one file of weights, unless it is there already.

        progress: called with the bytes of each tensor.

        Raises:
            CheckpointError: A tensor cannot be read, or the disk is full.
        """
        path = self._folder / planned.name
        if planned.name in self._digests and _digest(path) == self._digests[planned.name]:
            progress(planned.size_bytes)
            return
        partial = self._folder / f"{planned.name}.partial"
        try:
            self._digests[planned.name] = _write(partial, planned, progress)
            partial.replace(path)
            self._save(finished=False)
        except OSError as error:
            raise CheckpointError(
                f"{partial}: cannot be written: {error.strerror}; make room, and run the same "
                "command again to continue"
            ) from error

    def finish(self, files: Sequence[PlannedFile]) -> None:
        """Write the index, and mark the conversion as finished."""
        if len(files) > 1:
            weight_map = {recipe.name: file.name for file in files for recipe in file.recipes}
            total = sum(file.size_bytes for file in files)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            self.write_small("model.safetensors.index.json", json.dumps(index, indent=2).encode())
        self._save(finished=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found["made_of"], dict) and isinstance(found["files"], dict):
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise CheckpointError(f"{path}: damaged; remove the folder and convert again")


def _write(path: Path, planned: PlannedFile, progress: Callable[[int], None]) -> str:
    """Write a file, and return the SHA-256 of its content."""
    digest = hashlib.sha256()
    header = _header(planned)
    with (
        ThreadPoolExecutor(_BUILDERS) as builders,
        ThreadPoolExecutor(1) as hashing,
        ReadAhead() as ahead,
        path.open("wb", buffering=0) as file,
    ):
        _write_all(file, memoryview(header))
        digest.update(header)
        end = len(header)
        arrays = _built(planned.recipes, builders, ahead)
        for recipe in planned.recipes:
            data = memoryview(next(arrays).data).cast("B")
            for start in range(0, len(data), _WRITE_BYTES):
                block = data[start : start + _WRITE_BYTES]
                hashed = hashing.submit(digest.update, block)
                _write_all(file, block)
                write_soon(file.fileno(), end, len(block))
                end += len(block)
                hashed.result()
                del block, hashed
            del data
            progress(recipe.size_bytes)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _write_all(file: io.FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _built(
    recipes: Sequence[Recipe], builders: ThreadPoolExecutor, disk: ReadAhead
) -> Iterator[Array]:
    """Yield the tensors in order; small ones are built while those before them are written."""
    spans = _spans_ahead(recipes)
    building: deque[Future[Array]] = deque()
    begun, held = 0, 0
    for recipe in recipes:
        disk.ask(next(spans))
        while begun < len(recipes) and (
            not building or held + recipes[begun].size_bytes <= _AHEAD_BYTES
        ):
            building.append(builders.submit(recipes[begun].build))
            held += recipes[begun].size_bytes
            begun += 1
        yield building.popleft().result()
        held -= recipe.size_bytes


def _spans_ahead(recipes: Sequence[Recipe]) -> Iterator[list[Range]]:
    """Yield for each recipe what is to be read ahead then; nothing is named twice."""
    asked: set[Range] = set()
    reached, waiting = 0, 0
    for recipe in recipes:
        found: set[Range] = set()
        while reached < len(recipes) and waiting < _READ_AHEAD_BYTES:
            found |= recipes[reached].spans - asked
            waiting += recipes[reached].size_bytes
            reached += 1
        asked |= found
        waiting -= recipe.size_bytes
        yield sorted(found)


def _header(planned: PlannedFile) -> bytes:
    """Return the beginning of a safetensors file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for recipe in planned.recipes:
        end = begin + recipe.size_bytes
        entries[recipe.name] = {
            "dtype": recipe.dtype,
            "shape": list(recipe.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file's content; None if there is none."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_WRITE_BYTES):
                digest.update(block)
    except FileNotFoundError:
        return None
    return digest.hexdigest()
