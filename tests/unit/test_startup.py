"""The start-up message: what is written is read, and nothing else is taken for it."""

import math
from pathlib import Path

import pytest

from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.shards.startup import StartUp, decode, encode
from nightjar.gpu_worker.worker.configuration import compute_config
from nightjar.pipeline.settings import Settings


def test_what_is_written_is_read() -> None:
    config = ComputeConfig(
        Path("/models/\ubc24\udcff"),  # a path may hold bytes that are not UTF-8
        dtype="bf16",
        kv_cache_bytes=5,
        stalled_after_s=math.inf,
        shards=2,
        devices=("1", "3"),
        cuda_graphs=False,
    )
    start = StartUp(config, 3, worker=4, rank=0, life=5, meeting=Path("m"), followers=(6, 7))
    assert decode([encode(start)]) == start


def test_only_what_was_chosen_is_shown() -> None:
    start = StartUp(ComputeConfig(Path("/m"), threads=1), 3)
    assert encode(start) == '{"config": {"model": "/m", "threads": 1}, "pipe": 3}'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"config": {"model": "m"}, "pipe": 3, "rang": 1}', "StartUp has no field rang"),
        ('{"config": {"model": "m", "dtipe": 1}, "pipe": 3}', "ComputeConfig has no field dtipe"),
        ('{"config": {"model": "m", "threads": "1"}, "pipe": 3}', r"`int | null`, got `str`"),
        ('{"config": {"model": "m", "engine": "real"}, "pipe": 3}', "Invalid enum value 'real'"),
        ('{"config": {"model": "m"}}', "missing required field `pipe`"),
        ("--model=m", "Expecting value"),
    ],
)
def test_a_message_of_another_form_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        decode([text])


@pytest.mark.parametrize("arguments", [[], ["{}", "{}"]])
def test_there_is_one_argument(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="give one argument"):
        decode(arguments)


def test_settings_that_nobody_gave_are_the_defaults_of_the_record() -> None:
    assert compute_config(Settings.read(), Path("m")) == ComputeConfig(Path("m"))
