"""A model directory's fingerprint: another content is another model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from nightjar.checkpoints.safetensors_header import SafetensorsHeader

# What answers depend on beside the weights; generation_config.json holds the end-of-text tokens,
# the last two the chat template.
SMALL_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

WHOLE_BYTES = 2 << 30
"""A weight file of up to so many bytes is read whole (a second or two a GiB)."""
SAMPLES = 64
SAMPLE_BYTES = 64 * 1024
CHUNK_BYTES = 1 << 20


def fingerprint(directory: Path, headers: Iterable[SafetensorsHeader]) -> str:
    """sha256, in hexadecimal, over the small files and each weight file's name, size and content.

    Of a weight file past WHOLE_BYTES only the header and evenly spread samples count.  Training a
    model on changes nearly every number and is seen in them; an edit of a single tensor in so
    large a file may fall between them.
    """
    digest = hashlib.sha256()
    for name in SMALL_NAMES:
        if (directory / name).is_file():
            content = (directory / name).read_bytes()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    for header in headers:
        digest.update(f"{header.path.name}\0{header.size_bytes}\0".encode() + header.raw)
        for chunk in _content(header):
            digest.update(chunk)
    return digest.hexdigest()


def _content(header: SafetensorsHeader) -> Iterator[bytes]:
    """All bytes of the file, or samples of a large one."""
    size, stride = CHUNK_BYTES, CHUNK_BYTES
    if header.size_bytes > WHOLE_BYTES:
        size = SAMPLE_BYTES
        stride = max(1, header.size_bytes // (SAMPLES * SAMPLE_BYTES)) * SAMPLE_BYTES
    with header.path.open("rb") as file:
        for start in range(0, header.size_bytes, stride):
            file.seek(start)
            yield file.read(size)
