"""The budget of compiled kernels, and the parts that it and the GPU's backend are made of."""

import json
import os
import random
import re
from collections import defaultdict
from dataclasses import replace
from zlib import crc32

import pytest
import torch

from nightjar.kernels.cuda import cubin_cache, kernel_budget, launch, nvrtc
from nightjar.kernels.cuda.catalogue import ARCHITECTURES, WRAPPERS, all_kernels, by_source
from nightjar.kernels.cuda.kernel import Kernel
from nightjar.kernels.cuda.resources import Resources, parse_report

PHILOX = Kernel("philox", "uniform")


@pytest.fixture
def compiler():
    """NVRTC and the CUDA headers."""
    try:
        return nvrtc.Toolkit.find()
    except nvrtc.CompilerMissingError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def assert_within_budget(arch, kernels):
    sources = {
        source: chosen
        for source, listed in by_source().items()
        if (chosen := [kernel for kernel in listed if kernel in kernels])
    }
    measured = kernel_budget.measure_all(arch, sources)
    assert measured.keys() == {kernel.expression for kernel in kernels}
    assert kernel_budget.violations(measured, kernels, kernel_budget.read_budget()[arch]) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 256 kernels: minutes where nothing else runs
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_within_its_budget(compiler, arch):
    assert_within_budget(arch, list(all_kernels()))


def test_kernels_of_every_group_compile_within_their_budget(compiler):
    """An eighth of each group for one architecture; `make test-all` compiles every kernel for all.

    The sources seed the choice: other kernels are compiled after each change.
    """
    sources = b"".join(path.read_bytes() for path in sorted(nvrtc.SOURCES.glob("*.cu*")))
    rng = random.Random(crc32(sources))
    groups = defaultdict(list)
    for kernel in all_kernels():
        groups[kernel_budget.group(kernel)].append(kernel)
    chosen = [one for group in groups.values() for one in rng.sample(group, -(-len(group) // 8))]
    assert_within_budget("sm_90", chosen)


def test_the_budget_allows_no_spills_and_no_local_arrays():
    """Where one is needed after all, it is named here with its reason."""
    for groups in kernel_budget.read_budget().values():
        for needs in groups.values():
            assert (needs.spill_bytes, needs.stack_bytes) == (0, 0)


def test_the_budget_is_as_the_gate_writes_it(tmp_path):
    copy = tmp_path / "budget.json"
    kernel_budget.write_budget(kernel_budget.read_budget(), copy)
    assert copy.read_text() == kernel_budget.BUDGET.read_text()
    assert list(json.loads(copy.read_text())) == list(ARCHITECTURES)


def test_every_source_has_its_wrapper_and_every_kernel_is_in_its_source():
    sources = {path.stem: path.read_text() for path in nvrtc.SOURCES.glob("*.cu")}
    assert sources.keys() == {module.__name__.rpartition(".")[2] for module in WRAPPERS}
    for kernel in all_kernels():
        assert re.search(rf"\b{kernel.entry}\(", sources[kernel.source])
    assert len({kernel.expression for kernel in all_kernels()}) == len(list(all_kernels()))


def test_what_is_beyond_the_budget_is_named():
    budget = {"uniform": Resources(32, 0, 0, 0)}
    for change, message in (
        ({"registers": 33}, "33 registers, the budget is 32"),
        ({"spill_bytes": 8}, "8 spill_bytes, the budget is 0"),
        ({"stack_bytes": 16}, "16 stack_bytes, the budget is 0"),
    ):
        measured = {"uniform": replace(budget["uniform"], **change)}
        assert kernel_budget.violations(measured, [PHILOX], budget) == [f"uniform: {message}"]
    assert kernel_budget.violations({"uniform": budget["uniform"]}, [PHILOX], budget) == []
    assert "no budget for 'uniform'" in kernel_budget.violations({}, [PHILOX], {})[0]


def test_a_budget_is_the_most_that_any_of_its_kernels_needs():
    kernels = [Kernel("merge", "merge_attention", (t,)) for t in ("float", "__half")]
    measured = {
        kernels[0].expression: Resources(20, 0, 8, 100),
        kernels[1].expression: Resources(30, 16, 0, 50),
    }
    assert kernel_budget.most_needed(measured, kernels) == {
        "merge_attention": Resources(30, 16, 8, 100)
    }


def test_a_spilling_kernel_is_seen(compiler, tmp_path, monkeypatch):
    """A real one: an array that is indexed at run time cannot stay in registers."""
    source = """__global__ void uniform(int* x) {
      int kept[40];
      for (int i = 0; i < 40; ++i) kept[i] = x[i] * i;
      for (int i = 0; i < 40; ++i) x[i] = kept[x[i] % 40];
    }"""
    (tmp_path / "philox.cu").write_text(source)
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    measured = kernel_budget.measure([PHILOX], "sm_90")
    assert measured["uniform"].stack_bytes >= 160
    assert kernel_budget.violations(measured, [PHILOX], kernel_budget.read_budget()["sm_90"])


REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1av' for 'sm_90'
ptxas info    : Function properties for _Z1av
ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 2568 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90'
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def test_the_report_of_ptxas_is_read():
    assert parse_report(REPORT) == {
        "_Z1av": Resources(40, 8, 28, 2568),
        "b": Resources(8, 0, 0, 0),
    }


def test_a_report_that_lacks_a_line_is_refused():
    with pytest.raises(ValueError, match="report of b is not complete"):
        parse_report(REPORT.replace("Used 8 registers", ""))


def test_a_wrong_source_shows_the_compilers_words(compiler, tmp_path, monkeypatch):
    (tmp_path / "bad.cu").write_text("__global__ void bad() { nonsense; }")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    with pytest.raises(nvrtc.CompilationError, match=r"bad\.cu for sm_90(.|\n)*nonsense"):
        nvrtc.compile_source("bad", ["bad"], "sm_90")


def test_an_instance_that_is_none_is_refused(compiler):
    with pytest.raises(nvrtc.CompilationError, match=r"philox\.cu for sm_90"):
        nvrtc.compile_source("philox", ["uniform<float>"], "sm_90")


def test_a_machine_without_the_compiler_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda"))
    nvrtc.Toolkit.find.cache_clear()
    try:
        with pytest.raises(nvrtc.CompilerMissingError, match="install nvidia-cuda-nvrtc"):
            nvrtc.Toolkit.find()
    finally:
        nvrtc.Toolkit.find.cache_clear()


def test_a_kernel_is_compiled_once_and_again_when_its_source_changes(
    compiler, tmp_path, monkeypatch
):
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("philox.cu", "common.cuh"):
        (sources / name).write_text((nvrtc.SOURCES / name).read_text())
    monkeypatch.setattr(nvrtc, "SOURCES", sources)
    compiled = []
    compile_source = nvrtc.compile_source

    def counting(*args):
        compiled.append(args)
        return compile_source(*args)

    monkeypatch.setattr(nvrtc, "compile_source", counting)
    path, symbol = cubin_cache.cubin(PHILOX, "sm_90", tmp_path / "cache")
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert symbol.encode() in path.read_bytes()
    assert cubin_cache.cubin(PHILOX, "sm_90", tmp_path / "cache") == (path, symbol)
    assert len(compiled) == 1
    header = sources / "common.cuh"
    header.write_text(header.read_text() + "// changed\n")
    assert cubin_cache.cubin(PHILOX, "sm_90", tmp_path / "cache")[0] != path
    assert cubin_cache.cubin(PHILOX, "sm_80", tmp_path / "cache")[0] != path
    assert len(compiled) == 3


def test_instances_are_named_as_in_cpp():
    kernel = Kernel.of("norm", "norm", torch.float32, torch.bfloat16, True, 4, "Silu")
    assert kernel.expression == "norm<float, __nv_bfloat16, true, 4, Silu>"
    assert PHILOX.expression == "uniform"


def test_an_empty_grid_starts_nothing():
    started = []

    def backend(*args):
        started.append(args)

    with launch.using(backend):
        launch.launch(PHILOX, (0, 4), (128,))
        launch.launch(PHILOX, (1,), (128,), None)
        launch.launch(PHILOX, (1,), (128,), None, shared_bytes=8)
    assert started == [(PHILOX, (1,), (128,), (None,), shared) for shared in (0, 8)]
