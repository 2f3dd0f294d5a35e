"""Accesses outside of what the kernel was given, and reads of what nobody wrote."""

import numpy as np
import pytest
import torch

from tests.cuda_host import KernelFault, RawModule, schedule

SOURCE = r"""
extern "C" __global__ void read_at(const float* x, float* out, int index) { out[0] = x[index]; }
extern "C" __global__ void write_at(float* x, int index) { x[index] = 1.0f; }
extern "C" __global__ void add_at(float* x, int index) { atomicAdd(x + index, 1.0f); }
extern "C" __global__ void cast_const_away(const float* x) { const_cast<float*>(x)[0] = 1.0f; }

extern "C" __global__ void copy_wide(const float* x, float* out, int index) {
  *reinterpret_cast<float4*>(out) = *reinterpret_cast<const float4*>(x + index);
}
extern "C" __global__ void ask_for(float* x, int index, int bytes) {
  cuda_host::prefetch_l2(x + index, bytes);
  x[threadIdx.x] = 1.0f;
}
struct alignas(32) Row { float at[8]; };
extern "C" __global__ void copy_struct(const Row* x, Row* out, int index) { *out = x[index]; }

__device__ void put(float* where, float value) { *where = value; }
extern "C" __global__ void shared_index(float* out, int index) {
  __shared__ float first[8];
  __shared__ float second[8];
  first[index % 8] = second[index % 8] = 0;
  out[0] = first[index] + second[0];
}
extern "C" __global__ void shared_pointer(float* out, int index) {
  __shared__ float first[8], second[8], third[8];
  put(first, 1), put(second, 2), put(third, 3);
  put(second + index, 4);
  out[0] = *first + *second + *third;
}
extern "C" __global__ void shared_square(float* out, int row, int column) {
  __shared__ float square[4][4];
  square[row][column] = 1;
  out[0] = square[row][column];
}
extern "C" __global__ void dynamic_index(float* out, int index) {
  extern __shared__ float dynamic[];
  dynamic[index] = 2.0f;
  out[0] = dynamic[index];
}
extern "C" __global__ void local_index(float* out, int index) {
  float few[4] = {1, 2, 3, 4};
  out[0] = few[index];
}

extern "C" __global__ void sum_of_some(float* out, int written, int read) {
  __shared__ float box[64];
  if (threadIdx.x < written) box[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int i = 0; i < read; ++i) sum += box[i];
    out[blockIdx.x] = sum;
  }
}
extern "C" __global__ void half_a_word(unsigned* out) {
  __shared__ unsigned word;
  if (threadIdx.x == 0) {
    *reinterpret_cast<unsigned short*>(&word) = 1;
    out[0] = word;
  }
}
extern "C" __global__ void bitmap_without_clearing(unsigned* out) {
  __shared__ unsigned bits;
  atomicOr(&bits, 1u << threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = bits;
}
__device__ int table[4] = {10, 20, 30, 40};
extern "C" __global__ void read_table(int* out, int index) {
  int* entry = table + index;
  out[0] = *entry;
}
"""


@pytest.fixture(scope="module")
def module():
    return RawModule(SOURCE)


def fault(module, name, *args, block=1, grid=1, shared_mem=0):
    with pytest.raises(KernelFault) as caught:
        module.get_function(name)((grid,), (block,), args, shared_mem=shared_mem)
    return caught.value


def floats(n):
    return np.zeros(n, np.float32)


@pytest.mark.parametrize("index", [10, 11, 5000])
def test_a_read_past_the_end(module, index):
    found = fault(module, "read_at", floats(10), floats(1), np.int32(index))
    assert found.kinds == {"out of bounds"}
    assert f"offset {4 * index} of argument 0 (40 bytes)" in str(found)
    assert "reads at kernel.cu:2 in read_at" in str(found)


def test_a_read_before_the_beginning(module):
    found = fault(module, "read_at", floats(10), floats(1), np.int32(-1))
    assert "4 bytes, 4 before the beginning of argument 0" in str(found)


def test_an_index_far_from_every_array(module):
    found = fault(module, "read_at", floats(10), floats(1), np.int32(1 << 30))
    assert "near no array" in str(found)


@pytest.mark.parametrize("name", ["write_at", "add_at"])
def test_a_write_past_the_end_does_not_happen(module, name):
    backing = floats(11)
    found = fault(module, name, backing[:10], np.int32(10))
    assert found.kinds == {"out of bounds"}
    assert backing[10] == 0


def test_a_null_pointer(module):
    assert fault(module, "read_at", None, floats(1), np.int32(0)).kinds == {"out of bounds"}


def test_an_empty_array_has_no_first_element(module):
    found = fault(module, "read_at", floats(0), floats(1), np.int32(0))
    assert "argument 0 (0 bytes)" in str(found)


def test_the_span_of_a_strided_view_is_what_may_be_read(module):
    backing = torch.arange(20.0)
    view, out = backing[2:12:3], torch.zeros(1)  # elements 2, 5, 8, 11
    module.get_function("read_at")((1,), (1,), (view, out, np.int32(9)))
    assert out[0] == 11
    assert fault(module, "read_at", view, out, np.int32(10)).kinds == {"out of bounds"}


def test_a_write_to_const(module):
    found = fault(module, "cast_const_away", floats(1))
    assert found.kinds == {"write to const"}


def test_a_const_pointer_to_what_another_argument_may_write(module):
    x = floats(4)
    module.get_function("read_at")((1,), (1,), (x, x, np.int32(3)))
    assert x[0] == 0


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_wide_load_that_is_not_aligned(module, index):
    found = fault(module, "copy_wide", floats(16), floats(4), np.int32(index))
    assert found.kinds == {"misaligned"}
    assert f"{4 * index} past a multiple of 16" in str(found)


def test_a_wide_load_that_is_aligned(module):
    x, out = np.arange(16, dtype=np.float32), floats(4)
    module.get_function("copy_wide")((1,), (1,), (x, out, np.int32(8)))
    assert out.tolist() == [8, 9, 10, 11]


def test_a_view_is_as_misaligned_here_as_on_a_gpu(module):
    x = torch.zeros(17)
    assert fault(module, "copy_wide", x[1:], floats(4), np.int32(0)).kinds == {"misaligned"}
    module.get_function("copy_wide")((1,), (1,), (x[1:], floats(4), np.int32(3)))


def test_a_wide_load_that_ends_past_the_end(module):
    found = fault(module, "copy_wide", floats(6), floats(4), np.int32(4))
    assert found.kinds == {"out of bounds"}


def test_what_is_asked_for_ahead_must_be_there_and_races_with_nobody(module):
    x = torch.zeros(64)
    module.get_function("ask_for")((1,), (64,), (x, np.int32(16), np.int32(192)))
    assert x.eq(1).all()
    for index, bytes_, message in ((20, 192, "out of bounds"), (17, 16, "misalign"), (0, 8, "16")):
        with pytest.raises(KernelFault, match=message):
            module.get_function("ask_for")((1,), (64,), (x, np.int32(index), np.int32(bytes_)))


def test_a_struct_is_seen_whole(module):
    x, out = np.arange(16, dtype=np.float32), floats(8)
    module.get_function("copy_struct")((1,), (1,), (x, out, np.int32(1)))
    assert out.tolist() == list(range(8, 16))
    assert fault(module, "copy_struct", x, out, np.int32(2)).kinds == {"out of bounds"}
    assert fault(module, "copy_struct", x, floats(7), np.int32(0)).kinds == {"out of bounds"}


@pytest.mark.parametrize("index", [8, 9, -1])
def test_an_index_past_a_shared_array(module, index):
    found = fault(module, "shared_index", floats(1), np.int32(index))
    assert found.kinds == {"out of bounds"}


@pytest.mark.parametrize("index", [8, -1, 20])
def test_a_pointer_past_a_shared_array_does_not_reach_its_neighbour(module, index):
    found = fault(module, "shared_pointer", floats(1), np.int32(index))
    assert found.kinds == {"out of bounds"}
    assert "in put, called at" in str(found)


@pytest.mark.parametrize(("row", "column"), [(0, 4), (4, 0), (1, -1)])
def test_a_row_does_not_run_into_the_next(module, row, column):
    found = fault(module, "shared_square", floats(1), np.int32(row), np.int32(column))
    assert found.kinds == {"out of bounds"}


def test_dynamic_shared_memory_has_the_size_of_the_launch(module):
    out = floats(1)
    kernel = module.get_function("dynamic_index")
    kernel((1,), (1,), (out, np.int32(3)), shared_mem=16)
    assert out[0] == 2
    found = fault(module, "dynamic_index", out, np.int32(4), shared_mem=16)
    assert "dynamic shared memory (16 bytes)" in str(found)
    assert fault(module, "dynamic_index", out, np.int32(0)).kinds == {"out of bounds"}


def test_an_index_past_a_threads_own_array(module):
    found = fault(module, "local_index", floats(1), np.int32(4))
    assert "index 4 of an array 'float [4]'" in str(found)


def test_a_variable_of_the_module(module):
    out = np.zeros(1, np.int32)
    module.get_function("read_table")((1,), (1,), (out, np.int32(3)))
    assert out[0] == 40
    assert fault(module, "read_table", out, np.int32(4)).kinds == {"out of bounds"}


@pytest.mark.parametrize("seed", range(4))
def test_shared_memory_that_was_never_written(module, seed):
    with schedule(seed):
        found = fault(module, "sum_of_some", floats(1), np.int32(9), np.int32(10), block=64)
    assert found.kinds == {"uninitialised read"}
    assert "bytes 36 to 39 of shared memory sum_of_some::box" in str(found)


def test_shared_memory_does_not_outlive_its_block(module):
    out = floats(3)
    module.get_function("sum_of_some")((3,), (64,), (out, np.int32(64), np.int32(64)))
    assert out.tolist() == [64, 64, 64]
    found = fault(module, "sum_of_some", out, np.int32(0), np.int32(1), block=64)
    assert found.kinds == {"uninitialised read"}


def test_what_was_never_written_is_not_a_number(module):
    out = floats(1)
    fault(module, "sum_of_some", out, np.int32(9), np.int32(10), block=64)
    assert np.isnan(out[0])


def test_half_a_word_written_is_half_a_word_uninitialised(module):
    found = fault(module, "half_a_word", np.zeros(1, np.uint32))
    assert "bytes 2 to 3 of shared memory half_a_word::word" in str(found)


def test_an_atomic_reads_too(module):
    found = fault(module, "bitmap_without_clearing", np.zeros(32, np.uint32), block=32)
    assert found.kinds == {"uninitialised read"}
