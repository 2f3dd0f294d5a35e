"""Compiling and launching: what is refused, and how."""

import threading

import numpy as np
import pytest
import torch

from tests.cuda_host import (
    CompileError,
    KernelFault,
    RawModule,
    compiler,
    missing_tools,
    require_tools,
    schedule,
)

SOURCE = r"""
#include <cuda_bf16.h>
#ifndef STEP
#define STEP 1
#endif
template <class T> __global__ void add_step(T* x, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = T(float(x[i]) + STEP);
}
struct Pair { int a; float b; };
extern "C" __global__ void __launch_bounds__(128) values(
    double* out, int i, long long l, unsigned u, float f, double d, bool b, __nv_bfloat16* t,
    Pair p) {
  out[0] = i, out[1] = double(l), out[2] = u, out[3] = f, out[4] = d, out[5] = b;
  out[6] = t ? float(t[0]) : -1, out[7] = p.a + p.b;
}
extern "C" __global__ void copy(const int* x, int* out) { out[threadIdx.x] = x[threadIdx.x]; }
extern "C" __global__ void count(unsigned* n) { atomicAdd(n, 1u); }
"""


@pytest.fixture(scope="module")
def module():
    return RawModule(SOURCE, name_expressions=["add_step<float>", "add_step<__nv_bfloat16>"])


def all_values(**changed):
    given = {
        "out": np.zeros(8),
        "i": np.int32(-1),
        "l": np.int64(2),
        "u": np.uint32(3),
        "f": np.float32(4),
        "d": np.float64(5),
        "b": np.bool_(True),
        "t": torch.tensor([6.0], dtype=torch.bfloat16),
        "p": np.array((7, 0.5), np.dtype([("a", "i4"), ("b", "f4")]))[()],
    }
    return tuple((given | changed).values())


def test_values_of_every_type(module):
    args = all_values()
    module.get_function("values")((1,), (1,), args)
    assert args[0].tolist() == [-1, 2, 3, 4, 5, 1, 6, 7.5]


def test_python_numbers_are_as_wide_as_cupy_makes_them(module):
    args = all_values(l=20, d=0.5, b=False, t=None)
    module.get_function("values")((1,), (1,), args)
    assert args[0].tolist() == [-1, 20, 3, 4, 0.5, 0, -1, 7.5]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"i": 1}, "argument 1 is signed of 4 bytes; 1 is int64 of 8"),
        ({"f": 1.0}, "argument 4 is floating point of 4 bytes; 1.0 is float64 of 8"),
        ({"f": np.int32(1)}, "argument 4 is floating point of 4 bytes"),
        ({"i": np.float32(1)}, "argument 1 is signed of 4 bytes"),
        ({"i": torch.zeros(1)}, "argument 1 is a value of 4 bytes, not a pointer"),
        ({"b": np.int8(1)}, "argument 6 is bool"),
        ({"p": np.int32(1)}, "argument 8 is a struct of 8 bytes"),
        ({"out": 12345}, "argument 0 is a pointer: give a numpy array"),
        ({"out": np.zeros(8, np.float32)}, "argument 0 points to floating point elements of 8"),
        ({"out": np.zeros(8, np.int64)}, "argument 0 points to floating point"),
        ({"t": torch.zeros(1).half()}, "argument 7 points to bfloat16 elements of 2 bytes"),
        ({"t": torch.zeros(1, device="meta", dtype=torch.bfloat16)}, "a tensor on meta"),
    ],
)
def test_an_argument_that_does_not_fit(module, changed, message):
    with pytest.raises(TypeError, match=message):
        module.get_function("values")((1,), (1,), all_values(**changed))


def test_the_number_of_arguments(module):
    with pytest.raises(TypeError, match="copy takes 2 arguments, 1 given"):
        module.get_function("copy")((1,), (1,), (np.zeros(1, np.int32),))


@pytest.mark.parametrize(
    ("grid", "block", "shared_mem", "message"),
    [
        ((0,), (1,), 0, "grid"),
        ((1, 1, 1, 1), (1,), 0, "grid"),
        ((1,), (0,), 0, "block"),
        ((1,), (1025,), 0, "1025 threads a block"),
        ((1,), (32, 33), 0, "1056 threads a block"),
        ((1,), (1,), -1, "shared_mem=-1"),
        ((1,), (1,), 227 * 1024 + 1, "shared_mem=232449"),
    ],
)
def test_a_launch_that_no_gpu_takes(module, grid, block, shared_mem, message):
    args = (np.zeros(1, np.int32), np.zeros(1, np.int32))
    with pytest.raises(ValueError, match=message):
        module.get_function("copy")(grid, block, args, shared_mem=shared_mem)


@pytest.mark.parametrize(
    ("dtype", "ctype"), [(torch.float32, "float"), (torch.bfloat16, "__nv_bfloat16")]
)
def test_name_expressions(module, dtype, ctype):
    x = torch.arange(10, dtype=dtype)
    module.get_function(f"add_step<{ctype}>")((1,), (4,), (x, np.int32(10)))
    assert x.tolist() == list(range(1, 11))


def test_a_name_that_is_not_there(module):
    with pytest.raises(KeyError, match=r"no kernel 'sum'; there are values, copy, count, add_step"):
        module.get_function("sum")


def test_options_reach_the_source():
    options = ("--std=c++17", "-DSTEP=5", "-arch=sm_90a", "--use_fast_math")
    module = RawModule(SOURCE, options=options, name_expressions=["add_step<float>"])
    x = np.zeros(3, np.float32)
    module.get_function("add_step<float>")((1,), (32,), (x, np.int32(3)))
    assert x.tolist() == [5, 5, 5]


@pytest.mark.parametrize("option", ["-O3", "-D", "--maxrregcount=32"])
def test_an_option_that_the_host_does_not_know(option):
    with pytest.raises(ValueError, match=f"option '{option}'"):
        RawModule(SOURCE, options=(option,))


def test_a_file_finds_the_headers_beside_it(tmp_path):
    (tmp_path / "shift.cuh").write_text("__device__ int shift(int x) { return x + 2; }\n")
    source = tmp_path / "shift.cu"
    source.write_text(
        '#include "shift.cuh"\nextern "C" __global__ void shifted(int* x) { x[0] = shift(x[0]); }\n'
    )
    x = np.ones(1, np.int32)
    RawModule(path=source).get_function("shifted")((1,), (1,), (x,))
    assert x[0] == 3
    (tmp_path / "shift.cuh").write_text("__device__ int shift(int x) { return x + 9; }\n")
    RawModule(path=source).get_function("shifted")((1,), (1,), (x,))
    assert x[0] == 12


def test_a_source_that_does_not_compile():
    with pytest.raises(CompileError, match=r"kernel\.cu:2:.*'?nonsense'?"):
        RawModule('extern "C" __global__ void broken(int* x) {\n  x[0] = nonsense;\n}\n')


def test_a_header_that_is_not_there():
    with pytest.raises(CompileError, match=r"kernel\.cu:2.*cub/cub\.cuh"):
        RawModule("\n#include <cub/cub.cuh>\n")


@pytest.mark.parametrize("absent", [("g++",), ("addr2line", "readelf")])
def test_missing_tools_are_named(monkeypatch, absent):
    monkeypatch.setattr("shutil.which", lambda tool: None if tool in absent else f"/bin/{tool}")
    assert missing_tools() == f"the CUDA host needs {', '.join(absent)} (apt-get install g++)"


def test_another_processor_is_named(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert missing_tools() == "the CUDA host runs on x86-64, this is aarch64"


@pytest.mark.parametrize(("ci", "outcome"), [("1", pytest.fail), ("", pytest.skip)])
def test_missing_tools_skip_on_a_laptop_and_fail_in_ci(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(outcome.Exception, match="needs g"):
        require_tools()


def test_a_function_that_the_host_lacks_is_an_error_when_compiling():
    source = (
        'extern "C" int elsewhere();\nextern "C" __global__ void k(int* x) { *x = elsewhere(); }'
    )
    with pytest.raises(CompileError, match="elsewhere"):
        RawModule(source)


def test_a_source_without_a_kernel():
    with pytest.raises(CompileError, match="no name expression"):
        RawModule("__device__ int one() { return 1; }")


@pytest.mark.parametrize("given", [{}, {"code": SOURCE, "path": "x.cu"}])
def test_either_code_or_path(given):
    with pytest.raises(ValueError, match="either code or path"):
        RawModule(**given)


def test_the_same_source_is_compiled_once(module, monkeypatch):
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    RawModule(SOURCE, name_expressions=["add_step<float>", "add_step<__nv_bfloat16>"])


def test_two_modules_do_not_share_memory():
    source = """
    template <int n> __device__ int* room() { __shared__ int kept[4]; return kept; }
    extern "C" __global__ void k(int* out) { int* mine = room<1>(); mine[SLOT] = 1; out[0] = SLOT; }
    """
    for slot in (0, 3):
        out = np.zeros(1, np.int32)
        RawModule(source, options=(f"-DSLOT={slot}",)).get_function("k")((1,), (1,), (out,))
        assert out[0] == slot


def test_arrays_that_are_not_contiguous(module):
    backing = np.arange(12, dtype=np.int32).reshape(3, 4)
    out = np.zeros(10, np.int32)
    with pytest.raises(KernelFault):
        module.get_function("copy")((1,), (10,), (backing[:, 1:3], np.zeros(9, np.int32)))
    module.get_function("copy")((1,), (10,), (backing[:, 1:3], out))
    assert out.tolist() == list(range(1, 11))  # the memory from the first element to the last


def test_overlapping_arrays_stay_one_memory(module):
    x = np.arange(8, dtype=np.int32)
    module.get_function("copy")((1,), (4,), (x[4:], x[:6]))
    assert x.tolist() == [4, 5, 6, 7, 4, 5, 6, 7]


def test_what_a_faulty_kernel_wrote_can_be_seen(module):
    out = np.zeros(4, np.int32)
    with pytest.raises(KernelFault) as caught:
        module.get_function("copy")((1,), (5,), (np.arange(1, 6, dtype=np.int32), out))
    assert out.tolist() == [1, 2, 3, 4]
    assert caught.value.kernel == "copy"
    assert [finding.occurrences for finding in caught.value.findings] == [1]


def test_launches_of_several_threads_take_turns(module):
    counters = [np.zeros(1, np.uint32) for _ in range(4)]

    def work(counter):
        for seed in range(5):
            with schedule(seed):
                module.get_function("count")((4,), (32,), (counter,))

    threads = [threading.Thread(target=work, args=(counter,)) for counter in counters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [int(counter[0]) for counter in counters] == [640] * 4
