"""From --device to the engine: what is refused, and with which words."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nightjar.checkpoints import CheckpointError
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.compute import model_engine
from nightjar.gpu_worker.compute.model_engine import kv_cache_bytes
from nightjar.gpu_worker.engine.errors import CannotComputeError
from nightjar.gpu_worker.engine.gpu_memory import cache_budget
from nightjar.gpu_worker.models import load_model
from nightjar.gpu_worker.shards import startup
from nightjar.gpu_worker.shards.process import GroupMember
from nightjar.gpu_worker.shards.startup import StartUp
from nightjar.gpu_worker.worker.configuration import compute_config
from nightjar.kernels import device as devices
from nightjar.kernels.cuda import switches
from nightjar.kernels.device import DeviceError, require_working, use_device
from nightjar.pipeline.settings import Settings, SettingsError


@pytest.fixture
def machine(monkeypatch):
    """A machine with two GPUs and CuPy; a test takes away what it is about."""
    chosen = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(devices, "find_spec", lambda _: object())
    return chosen


def test_the_cpu_needs_nothing():
    assert use_device("cpu") == "cpu"


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_becomes_the_current_device(machine, name, index):
    assert use_device(name) == f"cuda:{index}"
    assert machine == [index]


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", ""])
def test_other_names_are_refused(machine, name):
    with pytest.raises(DeviceError, match="use cpu, cuda or cuda:<number>"):
        use_device(name)


def test_what_a_machine_lacks_is_named(machine, monkeypatch):
    with pytest.raises(DeviceError, match="torch sees 2 GPUs, cuda:0 to cuda:1"):
        use_device("cuda:2")
    with monkeypatch.context() as patch:
        patch.setattr(devices, "find_spec", lambda _: None)
        with pytest.raises(
            DeviceError, match=r"CuPy is not installed; install nightjar-batch\[gpu\]"
        ):
            use_device("cuda")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        with pytest.raises(DeviceError, match=r"capability 7\.5, the kernels need 8\.0"):
            use_device("cuda")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(DeviceError, match="torch sees no GPU"):
            use_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="built without CUDA"):
        use_device("cuda")
    assert machine == []


def test_a_device_that_has_failed_is_told_from_one_that_works(monkeypatch):
    def fail(device):
        raise RuntimeError(f"CUDA error: an illegal memory access on {device}")

    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    require_working(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1")]
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match="illegal memory access on cuda:1"):
        require_working(torch.device("cuda:1"))
    require_working(torch.device("cpu"))


def test_the_device_comes_from_the_environment_to_the_compute_process(monkeypatch, tmp_path):
    monkeypatch.setenv("NIGHTJAR_DEVICE", "cuda:3")
    monkeypatch.setenv("NIGHTJAR_KV_CACHE_BYTES", "8192")
    monkeypatch.setenv("NIGHTJAR_GPU_MEMORY_SHARE", "0.5")
    monkeypatch.setenv("NIGHTJAR_HOST_CACHE_BYTES", "4096")
    config = compute_config(Settings.read(), tmp_path)
    found = startup.decode([startup.encode(StartUp(config, pipe=9))]).config
    assert found == ComputeConfig(
        tmp_path,
        device="cuda:3",
        kv_cache_bytes=8192,
        gpu_memory_share=0.5,
        host_cache_bytes=4096,
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DEVICE", "gpu"),
        ("KV_CACHE_BYTES", "0"),
        ("GPU_MEMORY_SHARE", "0"),
        ("GPU_MEMORY_SHARE", "1.0"),
        ("HOST_CACHE_BYTES", "-1"),
    ],
)
def test_settings_that_cannot_be_used_are_named(monkeypatch, variable, value):
    monkeypatch.setenv(f"NIGHTJAR_{variable}", value)
    with pytest.raises(SettingsError, match=f"NIGHTJAR_{variable}"):
        Settings.read()


def test_the_cache_takes_a_share_of_what_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 4000))
    assert cache_budget("cuda:0", 0.85) == 850
    config = ComputeConfig(Path())
    assert kv_cache_bytes(config, "cuda:0") == 850
    assert kv_cache_bytes(config, "cuda:0", (2000, 600, 700)) == 510  # of the fullest GPU
    assert kv_cache_bytes(config, "cuda:0", (2000, 600), 200) == 340  # beside recorded steps
    with pytest.raises(ValueError, match="recorded steps take 600: set NIGHTJAR_CUDA_GRAPHS=false"):
        kv_cache_bytes(config, "cuda:0", (2000, 600), 600)
    assert kv_cache_bytes(replace(config, kv_cache_bytes=5), "cuda:0", (), 2000) == 5
    assert kv_cache_bytes(config, "cpu") is None


def test_a_model_that_does_not_fit_is_said_and_not_tried_again(machine, monkeypatch, caplog):
    """And what is switched off is logged before."""

    def build(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 200.00 GiB.")

    monkeypatch.setattr(switches, "_current", switches.Switches())
    monkeypatch.setattr(model_engine, "warm_up", lambda: None)
    monkeypatch.setattr(model_engine, "build_engine", build)
    config = ComputeConfig(
        Path(), device="cuda:1", window_steps=1, cuda_graphs=False, cuda_prefetch=False
    )
    start = StartUp(config, pipe=0)
    member = GroupMember.of(start)
    with pytest.raises(CannotComputeError, match=r"memory of cuda:1: .* allocate 200\.00 GiB"):
        model_engine.open_engine(start, member, None, None)
    assert switches.current() == switches.Switches(prefetch=False)
    assert "NIGHTJAR_CUDA_GRAPHS, NIGHTJAR_CUDA_PREFETCH, NIGHTJAR_WINDOW_STEPS=1" in caplog.text


@pytest.mark.parametrize("dtype", ["fp64", "int8"])
def test_a_dtype_without_cuda_kernels_is_refused_before_anything_is_read(dtype):
    unread = SimpleNamespace(config=SimpleNamespace(head_size=64))
    with pytest.raises(ValueError, match=f"{dtype!r} is not computed on cuda:0: use one of fp32"):
        load_model(unread, dtype, "cuda:0")


@pytest.mark.parametrize(("capability", "refused"), [((8, 6), True), ((8, 9), False)])
def test_fp8_needs_tensor_cores_for_it(capability, refused, monkeypatch):
    """Before anything is read: the next check is that of the heads."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    unread = SimpleNamespace(config=SimpleNamespace(head_size=8))
    message = r"cuda:1: it has compute capability 8\.6, .* 8\.9 or later; use bf16 or fp16"
    kind = ValueError if refused else CheckpointError
    with pytest.raises(kind, match=message if refused else "heads have 8 channels"):
        load_model(unread, "fp8", "cuda:1")


def test_a_worker_on_a_cpu_names_int8_in_the_place_of_fp8(monkeypatch):
    monkeypatch.setattr(model_engine, "warm_up", lambda: None)
    start = StartUp(ComputeConfig(Path(), dtype="fp8"), pipe=0)
    with pytest.raises(CannotComputeError, match=r"capability 8\.9 or later, .* use int8"):
        model_engine.open_engine(start, GroupMember.of(start), None, None)


def test_heads_without_cuda_kernels_are_refused(directory):
    with pytest.raises(CheckpointError, match="heads have 8 channels, and on cuda:0"):
        load_model(directory, "fp16", "cuda:0")


def test_a_vocabulary_that_nothing_draws_from_is_refused_before_anything_is_read():
    """Not at the first step, where every request would fail by itself."""
    config = SimpleNamespace(head_size=64, vocab_size=(1 << 18) + 1)
    with pytest.raises(CheckpointError, match="has 262145 tokens, and on cuda:0"):
        load_model(SimpleNamespace(config=config), "fp16", "cuda:0")
