"""An object store as the target of an export; pyarrow is an extra."""

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from pyarrow import fs


class ObjectTarget:
    """A prefix of an object store, through pyarrow; an object appears when it is uploaded whole."""

    def __init__(self, url: str) -> None:
        self._url = url
        scheme, _, rest = url.partition("://")
        self.name = f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}/"

    def held(self) -> AbstractContextManager[None]:
        """Nobody is kept out: two exports of one job write the same objects."""
        return nullcontext()

    def read(self, name: str) -> bytes | None:
        """As Target says."""
        store, path = self._place(name)
        if store.get_file_info(path).type != fs.FileType.File:
            return None
        with store.open_input_stream(path) as stream:
            found: bytes = stream.read()
            return found

    def size(self, name: str) -> int | None:
        """As Target says."""
        store, path = self._place(name)
        found = store.get_file_info(path)
        return int(found.size) if found.type == fs.FileType.File else None

    @contextmanager
    def made(self, name: str) -> Iterator[Path]:
        """Build in a temporary folder, and upload."""
        with tempfile.TemporaryDirectory(prefix="nightjar-export-") as folder:
            local = Path(folder, "object")
            yield local
            store, path = self._place(name)
            fs.copy_files(str(local), path, fs.LocalFileSystem(), store)

    def remove(self, name: str) -> None:
        """As Target says."""
        store, path = self._place(name)
        if store.get_file_info(path).type == fs.FileType.File:
            store.delete_file(path)

    def _place(self, name: str) -> tuple[fs.FileSystem, str]:
        url, mark, options = self._url.partition("?")
        store, path = fs.FileSystem.from_uri(f"{url}/{name}{mark}{options}")
        return store, path
