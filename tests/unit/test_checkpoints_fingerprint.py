"""The fingerprint of a model directory: every byte counts, and large files are read once."""

import json
import os

import pytest
from safetensors.torch import load_file, save_file

from nightjar.checkpoints import CheckpointError, ModelDirectory, digest_cache, fingerprint
from tests.models import Gpt2Shape, save_gpt2


@pytest.fixture
def model(tmp_path):
    return save_gpt2(tmp_path / "model", Gpt2Shape(n_inner=100))


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The files of which pieces are read, one entry a piece; small files count as large ones,
    and those of just now as those of long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(fingerprint, "REMEMBERED_BYTES", 50_000)
    monkeypatch.setattr(digest_cache, "_GRAIN_NS", -(10**12))
    names = []
    hash_piece = fingerprint.hash_piece

    def counted(path, start):
        names.append(path.name)
        return hash_piece(path, start)

    monkeypatch.setattr(fingerprint, "hash_piece", counted)
    return names


def change_config(model, **changes):
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_one_number(model, name):
    """Edit the last number of one tensor; the file keeps its size and header."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[-1] += 1
    save_file(tensors, str(path), metadata={"format": "pt"})


def flip_a_byte(path, place):
    """Edit a file in its place, and set its time back: size, inode and time stay."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns


def test_fingerprint_sees_other_weights_under_the_same_header(model):
    first = ModelDirectory.open(model).fingerprint
    save_gpt2(model, seed=1)
    assert ModelDirectory.open(model).fingerprint != first


def test_fingerprint_follows_the_content(model, tmp_path):
    first = ModelDirectory.open(model).fingerprint
    twin = save_gpt2(tmp_path / "twin", Gpt2Shape(n_inner=100))
    assert ModelDirectory.open(twin).fingerprint == first
    change_config(model, layer_norm_epsilon=1e-6)
    assert ModelDirectory.open(model).fingerprint != first


def test_fingerprint_sees_the_end_of_text_tokens(model):
    first = ModelDirectory.open(model).fingerprint
    (model / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    assert ModelDirectory.open(model).fingerprint != first


def test_fingerprint_sees_the_chat_template(model):
    prints = {ModelDirectory.open(model).fingerprint}
    for text in ("{{ messages }}", "{{ messages[0].content }}"):
        (model / "chat_template.jinja").write_text(text)
        prints.add(ModelDirectory.open(model).fingerprint)
    assert len(prints) == 3


@pytest.mark.parametrize("name", ["wte.weight", "h.0.attn.c_attn.bias", "h.1.ln_2.bias"])
def test_fingerprint_sees_a_single_number_of_a_large_file(model, read, name):
    first = ModelDirectory.open(model).fingerprint
    assert read.count("model.safetensors") > 10
    change_one_number(model, f"transformer.{name}")
    assert ModelDirectory.open(model).fingerprint != first


def test_fingerprint_sees_every_piece(model, read):
    path = model / "model.safetensors"
    prints = {ModelDirectory.open(model).fingerprint}
    size = path.stat().st_size
    places = [size - 1, *range(12_000, size, 10_000)]
    for place in places:
        flip_a_byte(path, place)
        prints.add(ModelDirectory.open(model).fingerprint)
    assert len(prints) == 1 + len(places)


def test_a_large_file_is_read_once_while_it_stays_the_same(model, read):
    first = ModelDirectory.open(model).fingerprint
    assert "model.safetensors" in read
    read.clear()
    assert ModelDirectory.open(model).fingerprint == first
    assert "model.safetensors" not in read
    flip_a_byte(model / "model.safetensors", 20_000)
    assert ModelDirectory.open(model).fingerprint != first
    assert "model.safetensors" in read


def test_a_file_in_the_place_of_another_is_read(model, read, tmp_path):
    first = ModelDirectory.open(model).fingerprint
    other = save_gpt2(tmp_path / "other", Gpt2Shape(n_inner=100), seed=1) / "model.safetensors"
    os.utime(other, ns=(1, (model / "model.safetensors").stat().st_mtime_ns))
    other.replace(model / "model.safetensors")
    assert ModelDirectory.open(model).fingerprint != first


def test_what_changed_a_moment_ago_is_not_remembered(model, read, monkeypatch):
    """Another change within the grain of the clock would look the same."""
    monkeypatch.setattr(digest_cache, "_GRAIN_NS", 10**12)
    first = ModelDirectory.open(model).fingerprint
    read.clear()
    assert ModelDirectory.open(model).fingerprint == first
    assert "model.safetensors" in read


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"not JSON", b'{"stamp": 1}'])
def test_a_damaged_note_is_no_note(model, read, tmp_path, content):
    first = ModelDirectory.open(model).fingerprint
    (note,) = (tmp_path / "cache").rglob("*.json")
    note.write_bytes(content)
    assert ModelDirectory.open(model).fingerprint == first


def test_a_cache_that_cannot_be_written_costs_reading_alone(model, read, tmp_path):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    first = ModelDirectory.open(model).fingerprint
    read.clear()
    assert ModelDirectory.open(model).fingerprint == first
    assert "model.safetensors" in read


def test_without_a_home_nothing_is_remembered(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert digest_cache.cache_folder() is None


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_files_that_change_after_they_were_opened_are_refused(model, name):
    opened = ModelDirectory.open(model)
    flip_a_byte(model / name, 20)
    with pytest.raises(CheckpointError, match="have changed"):
        _ = opened.fingerprint


def test_a_file_that_comes_later_is_a_change(model):
    opened = ModelDirectory.open(model)
    opened.check_unchanged(opened.stamp)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(CheckpointError, match="have changed"):
        opened.check_unchanged(opened.stamp)
