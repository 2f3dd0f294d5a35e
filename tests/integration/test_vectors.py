"""Registering prompt vectors: versions, and files that cannot be used."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save_file

from nightjar.jobs.store import Store
from nightjar.pipeline.files.vectors import VectorsError, register_vectors


def write(path: Path, *arrays: np.ndarray) -> Path:
    save_file({f"t{number}": array for number, array in enumerate(arrays)}, path)
    return path


def test_a_changed_file_is_a_new_version_and_the_same_one_is_not(
    store: Store, tmp_path: Path
) -> None:
    ones = write(tmp_path / "a", np.ones((3, 8), np.float16))
    twos = write(tmp_path / "b", np.full((2, 8), 2, np.float32))
    versions = [
        register_vectors(store.vectors, "tuned", path, 8).version for path in (ones, ones, twos)
    ]
    assert versions == [1, 1, 2]
    first = store.vectors.get("tuned", 1)
    assert first is not None
    (vectors,) = load(first.data).values()
    assert vectors.dtype == np.float32
    assert vectors.tolist() == np.ones((3, 8)).tolist()
    newest = store.vectors.get("tuned")
    assert newest is not None
    assert (newest.version, newest.length, newest.width) == (2, 2, 8)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ([np.ones((3, 9), np.float32)], "9 wide; this model needs 8"),
        ([np.ones(8, np.float32)], "must be [rows, width]"),
        ([np.ones((0, 8), np.float32)], "must be [rows, width]"),
        ([np.ones((3, 8), np.int32)], "int32"),
        ([np.full((3, 8), np.nan, np.float32)], "NaN"),
        ([np.ones((3, 8), np.float32)] * 2, "2 tensors"),
    ],
)
def test_tensors_that_cannot_be_used(
    store: Store, tmp_path: Path, arrays: list[np.ndarray], said: str
) -> None:
    with pytest.raises(VectorsError) as caught:
        register_vectors(store.vectors, "tuned", write(tmp_path / "v", *arrays), 8)
    assert said in str(caught.value)
    assert store.vectors.get("tuned") is None


def test_files_and_names_that_cannot_be_used(store: Store, tmp_path: Path) -> None:
    good = write(tmp_path / "good", np.ones((3, 8), np.float32))
    (tmp_path / "cut").write_bytes(good.read_bytes()[:-4])
    for name, path, said in [
        ("tuned", tmp_path / "absent", "cannot be read"),
        ("tuned", tmp_path / "cut", "not a whole safetensors file"),
        ("a@b", good, "without @"),
        ("", good, "1 to 255"),
    ]:
        with pytest.raises(VectorsError, match=said):
            register_vectors(store.vectors, name, path, 8)


def test_versions_that_are_registered_at_once_are_all_kept(store: Store) -> None:
    def put(number: int) -> int:
        data = bytes([number]) * 8
        digest = hashlib.sha256(data).hexdigest()
        return store.vectors.put("tuned", data, length=1, width=2, sha256=digest).version

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(put, range(24)))
    assert sorted(versions) == list(range(1, 25))
    for number, version in enumerate(versions):
        found = store.vectors.get("tuned", version)
        assert found is not None
        assert found.data == bytes([number]) * 8
