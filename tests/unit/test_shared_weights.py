"""Packed weights in one file: the same answers, shared pages, and damaged files made again."""

import logging
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.engine import Engine, EngineConfig
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.models.shared_weights import load_shared
from nightjar.kernels import serves_bfloat16
from tests.engines import drain, generate
from tests.families import CASES, save_family
from tests.models import Gpt2Shape, save_gpt2

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"


def answers(decoder, directory):
    engine = Engine(
        decoder, directory.tokenizer().token_bytes, EngineConfig(kv_cache_bytes=1 << 24)
    )
    return drain(engine, *(generate(n, max_tokens=6) for n in range(4)))


def shared(directory, folder, dtype="fp32"):
    return load_shared(directory, dtype, folder, partial(load_model, directory))


@pytest.fixture(name="tiny", scope="module")
def tiny_model(tmp_path_factory):
    return ModelDirectory.open(save_gpt2(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_mapped_model_answers_as_a_loaded_one(dtype, tiny, tmp_path):
    if dtype == "bf16" and not serves_bfloat16("cpu"):
        pytest.skip("this processor has no products of bfloat16")
    expected = answers(load_model(tiny, dtype), tiny)
    assert answers(shared(tiny, tmp_path / "w", dtype), tiny) == expected
    [path] = (tmp_path / "w").iterdir()
    assert path.name.startswith("tiny-")
    changed = path.stat().st_mtime_ns
    assert answers(shared(tiny, tmp_path / "w", dtype), tiny) == expected
    assert path.stat().st_mtime_ns == changed


@pytest.mark.parametrize("name", ["llama", "polyglot", "hyperclova x"])
def test_every_kind_of_layer_can_be_shared(name, tmp_path):
    directory = ModelDirectory.open(save_family(tmp_path / "model", CASES[name], seed=2))
    expected = answers(load_model(directory, "fp32"), directory)
    shared(directory, tmp_path / "w")
    assert answers(shared(directory, tmp_path / "w"), directory) == expected


def test_a_file_is_of_one_model_and_one_precision(tiny, tmp_path):
    other = ModelDirectory.open(save_gpt2(tmp_path / "tiny", Gpt2Shape(), seed=9))
    for directory, dtype in ((tiny, "fp32"), (tiny, "int8"), (other, "fp32")):
        shared(directory, tmp_path / "w", dtype)
    assert len(list((tmp_path / "w").iterdir())) == 3


def test_a_damaged_file_is_made_again(tiny, tmp_path, caplog):
    expected = answers(load_model(tiny, "fp32"), tiny)
    shared(tiny, tmp_path / "w")
    [path] = (tmp_path / "w").iterdir()
    whole = path.read_bytes()
    for damaged in (
        whole[:-4096],
        b"",
        whole[:2],
        b"XXXX" + whole[4:],
        whole.replace(b"Norm", b"Path"),
    ):
        path.unlink()
        path.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            assert answers(shared(tiny, tmp_path / "w"), tiny) == expected
        assert "is made again" in caplog.text
        caplog.clear()
        assert path.read_bytes() == whole


def test_what_cannot_be_written_is_loaded_as_ever(tiny, tmp_path, caplog):
    (tmp_path / "w").write_text("a file, and no folder")
    assert answers(shared(tiny, tmp_path / "w"), tiny)
    assert "are not shared with other workers" in caplog.text


def test_weights_of_torchs_kernels_are_not_shared(tiny, tmp_path, caplog):
    """fp64 has no compiled kernels."""
    assert shared(tiny, tmp_path / "w", "fp64").dtype == torch.float64
    assert "are not shared with other workers: FloatWeight" in caplog.text
    assert not (tmp_path / "w").exists()


HOLD = """
import sys
from functools import partial
from pathlib import Path
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.models.shared_weights import load_shared
directory = ModelDirectory.open(sys.argv[1])
decoder = load_shared(directory, "fp32", Path(sys.argv[2]), partial(load_model, directory))
print(float(sum(layer.up.panels.sum() for layer in decoder.weights.layers)), flush=True)
sys.stdin.read()
"""


def mapping(pid, name):
    """What smaps says of the mapping of a file: KiB by field."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    parts = [part for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text) if name in part]
    fields = re.findall(r"^(\w+): +(\d+) kB", "\n".join(parts), re.MULTILINE)
    found: dict[str, int] = {}
    for field, kib in fields:
        found[field] = found.get(field, 0) + int(kib)
    return found


def test_mapped_weights_are_no_memory_of_the_process(tiny, tmp_path):
    decoder = shared(tiny, tmp_path / "w")
    assert answers(decoder, tiny)
    [path] = (tmp_path / "w").iterdir()
    found = mapping("self", str(path))
    assert found["Rss"] >= 4 * 2 * 32 * 128 // 1024
    assert found["Anonymous"] == 0  # the file's pages, and no copies of them


@pytest.mark.slow
def test_two_processes_share_the_pages(tmp_path):
    """Both have read all feed-forward weights; each page of them is in memory once."""
    shutil.copytree(DEMO, tmp_path / "model")
    command = [sys.executable, "-c", HOLD, str(tmp_path / "model"), str(tmp_path / "w")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    held = []
    try:
        for _ in range(2):  # the first one writes the file and maps it
            held.append(subprocess.Popen(command, **pipes))
            assert held[-1].stdout.readline()
        found = [mapping(process.pid, ".weights") for process in held]
    finally:
        for process in held:
            process.communicate(timeout=30)
    up_kib = 4 * 192 * 768 * 4 // 1024
    for one in found:
        assert one["Rss"] >= up_kib
        assert one["Shared_Clean"] + one["Shared_Dirty"] >= up_kib
        assert one["Private_Dirty"] + one["Private_Clean"] < up_kib // 10
        assert one["Pss"] <= one["Rss"] * 0.6
