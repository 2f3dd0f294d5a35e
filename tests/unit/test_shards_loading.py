"""Each rank reads its own part of the weights and the whole embedding table.

The parts together are the model.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nightjar.checkpoints import ModelDirectory
from nightjar.checkpoints.weights import expected_tensors
from nightjar.gpu_worker.models import load_model, weight_reader
from nightjar.gpu_worker.models.split import Part
from nightjar.kernels.cuda import launch
from tests.families import CASES, save_family
from tests.kernels_cuda.devices import run_on_host
from tests.models import Gpt2Shape, save_gpt2

pytestmark = pytest.mark.usefixtures("one_thread")

EVERYWHERE = ("norm", "ln_", "wte", "wpe", "embed_in", "embed_tokens")
"""What the tensors are called that every rank needs whole."""


class CountingFile:
    """An opened weight file that writes down how many numbers of each tensor were read."""

    def __init__(self, file, read):
        self._file = file
        self._read = read

    def __enter__(self):
        self._file = self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def get_tensor(self, name):
        return self._count(name, self._file.get_tensor(name))

    def get_slice(self, name):
        return CountingSlice(self, name, self._file.get_slice(name))

    def _count(self, name, tensor):
        self._read[name] = self._read.get(name, 0) + tensor.numel()
        return tensor


class CountingSlice:
    def __init__(self, file, name, found):
        self._file, self._name, self._found = file, name, found

    def __getitem__(self, index):
        return self._file._count(self._name, self._found[index])


@pytest.fixture
def read(monkeypatch):
    """The numbers of each stored tensor that have been read."""
    counted = {}
    plain = weight_reader.safe_open
    monkeypatch.setattr(
        weight_reader, "safe_open", lambda *a, **k: CountingFile(plain(*a, **k), counted)
    )
    return counted


@pytest.fixture(scope="module", params=["gpt2", "polyglot", "llama", "hyperclova x, bare"])
def family(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("family") / "model"
    if request.param == "gpt2":
        return ModelDirectory.open(save_gpt2(path, Gpt2Shape(vocab_size=515, n_inner=90)))
    return ModelDirectory.open(save_family(path, CASES[request.param]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_reads_its_share_of_every_split_tensor(family, ranks, read):
    stored = {tensor.stored_name: name for name, tensor in family.tensors.items()}
    shapes = expected_tensors(family.config)
    kv_copies = max(1, ranks // family.config.n_kv_heads)
    total = dict.fromkeys(shapes, 0)
    for rank in range(ranks):
        read.clear()
        load_model(family, "fp32", part=Part.of(family.config, rank, ranks))
        for name, count in ((stored[key], count) for key, count in read.items()):
            total[name] += count
            if len(shapes[name]) == 2 and not any(part in name for part in EVERYWHERE):
                share = kv_copies if any(x in name for x in ("k_proj", "v_proj")) else 1
                whole = torch.Size(shapes[name]).numel()
                assert count <= share * (whole / ranks + max(shapes[name])), name
    for name, shape in shapes.items():
        whole = torch.Size(shape).numel()
        if any(part in name for part in EVERYWHERE):
            assert total[name] == ranks * whole, name
        elif any(part in name for part in ("k_proj", "v_proj")):
            assert total[name] == kv_copies * whole, name
        else:
            assert total[name] == whole, name


MEASURE = """
import sys
from nightjar.checkpoints import ModelDirectory
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.models.split import Part

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

directory = ModelDirectory.open(sys.argv[1])
before = anonymous()
ranks = int(sys.argv[2])
model = load_model(directory, "fp32", part=Part.of(directory.config, ranks - 1, ranks))
print(anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_of_four_keeps_the_table_and_a_quarter_of_the_model(tmp_path: Path) -> None:
    shape = Gpt2Shape(n_layer=4, n_embd=512, n_head=8, vocab_size=20_000, n_positions=64)
    model = save_gpt2(tmp_path / "model", shape)

    def kilobytes(ranks: int) -> int:
        command = [sys.executable, "-c", MEASURE, str(model), str(ranks)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    table = shape.vocab_size * shape.n_embd * 4 // 1024
    assert kilobytes(4) < table + 0.3 * kilobytes(1)


def test_a_tied_head_is_rows_of_the_ranks_table_where_a_head_is_not_packed(tmp_path):
    """As on a GPU: the part of the head takes no memory of its own."""
    directory = ModelDirectory.open(save_gpt2(tmp_path / "model", Gpt2Shape(vocab_size=515)))
    with launch.using(run_on_host):
        model = load_model(directory, "fp32", part=Part.of(directory.config, 1, 2))
    tokens, (head, *_) = model.weights.tokens, model.weights.head.prefetched
    assert tokens.shape[0] == 515
    assert head.shape[0] == 258
    assert head.data_ptr() == tokens[257:].data_ptr()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_stays_mapped_between_two_tensors(tmp_path):
    """Its pages would count as the process's, beside the weights made of them."""
    directory = ModelDirectory.open(save_gpt2(tmp_path / "model", Gpt2Shape()))
    reader = weight_reader.WeightReader(directory)
    for name in directory.tensors:
        found = reader.tensor(name, torch.float32, "cpu")
        assert found.numel() > 0
        assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
