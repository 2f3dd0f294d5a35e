"""Right kernels: clean on every schedule, and equal to numpy."""

import numpy as np
import pytest

from tests.cuda_host import RawModule, schedule

SOURCE = r"""
#include <cuda_fp16.h>
#include <math_constants.h>

extern "C" __global__ void sum_rows(const float* x, float* out, int n) {
  extern __shared__ float partial[];
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[blockIdx.x * n + i];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
}

template <class T, int kTile>
__global__ void transpose(const T* x, T* out, int rows, int columns) {
  __shared__ T tile[kTile][kTile + 1];
  int row = blockIdx.y * kTile + threadIdx.y, column = blockIdx.x * kTile + threadIdx.x;
  if (row < rows && column < columns) tile[threadIdx.y][threadIdx.x] = x[row * columns + column];
  __syncthreads();
  row = blockIdx.y * kTile + threadIdx.x, column = blockIdx.x * kTile + threadIdx.y;
  if (row < rows && column < columns) out[column * rows + row] = tile[threadIdx.x][threadIdx.y];
}

// Inclusive sums over one block, warp by warp.
extern "C" __global__ void scan(const int* x, int* out) {
  __shared__ int totals[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x[threadIdx.x];
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp; ++i) sum += totals[i];
  out[threadIdx.x] = sum;
}

struct Softmax { float largest, sum; };
__device__ Softmax merged(Softmax a, Softmax b) {
  const float largest = fmaxf(a.largest, b.largest);
  if (largest == -CUDART_INF_F) return {largest, 0};
  return {largest, a.sum * __expf(a.largest - largest) + b.sum * __expf(b.largest - largest)};
}
template <class T>
__global__ void online_softmax(const T* x, float* out, int n) {
  __shared__ Softmax warps[32];
  const T* row = x + blockIdx.x * n;
  Softmax mine = {-CUDART_INF_F, 0};
  for (int i = threadIdx.x; i < n; i += blockDim.x) mine = merged(mine, {float(row[i]), 1});
  for (int step = 16; step; step /= 2) {
    const Softmax other = {__shfl_xor_sync(0xffffffffu, mine.largest, step),
                           __shfl_xor_sync(0xffffffffu, mine.sum, step)};
    mine = merged(mine, other);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = warps[0];
  for (int i = 1; i < blockDim.x / 32; ++i) mine = merged(mine, warps[i]);
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    out[blockIdx.x * n + i] = __expf(float(row[i]) - mine.largest) / mine.sum;
  }
}

extern "C" __global__ void histogram(const int* x, unsigned* bins, int n) {
  __shared__ unsigned local[16];
  if (threadIdx.x < 16) local[threadIdx.x] = 0;
  __syncthreads();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&local[x[i]], 1u);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

// Many tokens, one bitmap: who sets the bit counts.
extern "C" __global__ void distinct(const int* ids, int* count, int n, int vocabulary) {
  extern __shared__ unsigned seen[];
  for (int i = threadIdx.x; i < (vocabulary + 31) / 32; i += blockDim.x) seen[i] = 0;
  __syncthreads();
  int mine = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const unsigned bit = 1u << (ids[i] & 31);
    mine += !(atomicOr(&seen[ids[i] >> 5], bit) & bit);
  }
  atomicAdd(count, mine);
}
"""
SEEDS = range(10)
NAMES = [
    "transpose<float, 16>",
    "transpose<__half, 8>",
    "online_softmax<float>",
    "online_softmax<__half>",
]


@pytest.fixture(scope="module")
def module():
    return RawModule(SOURCE, name_expressions=NAMES)


@pytest.fixture
def random():
    return np.random.default_rng(2)


@pytest.mark.parametrize("seed", SEEDS)
def test_reduction(module, random, seed):
    x = random.integers(-50, 50, (5, 300)).astype(np.float32)  # sums of integers are exact
    out = np.full(5, np.nan, np.float32)
    with schedule(seed):
        kernel = module.get_function("sum_rows")
        kernel((5,), (64,), (x, out, np.int32(300)), shared_mem=256)
    assert (out == x.sum(1)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("dtype", "ctype", "tile"), [("f4", "float", 16), ("f2", "__half", 8)])
def test_transpose(module, random, dtype, ctype, tile, seed):
    x = random.standard_normal((21, 35)).astype(dtype)
    out = np.zeros((35, 21), dtype)
    with schedule(seed):
        kernel = module.get_function(f"transpose<{ctype}, {tile}>")
        grid = (-(-35 // tile), -(-21 // tile))
        kernel(grid, (tile, tile), (x, out, np.int32(21), np.int32(35)))
    assert (out == x.T).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_scan(module, random, threads, seed):
    x = random.integers(-9, 9, threads).astype(np.int32)
    out = np.zeros(threads, np.int32)
    with schedule(seed):
        module.get_function("scan")((1,), (threads,), (x, out))
    assert (out == np.cumsum(x)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("dtype", "ctype"), [("f4", "float"), ("f2", "__half")])
@pytest.mark.parametrize("n", [1, 127, 300])
def test_online_softmax(module, random, dtype, ctype, n, seed):
    x = (5 * random.standard_normal((3, n))).astype(dtype)
    out = np.full((3, n), np.nan, np.float32)
    with schedule(seed):
        module.get_function(f"online_softmax<{ctype}>")((3,), (128,), (x, out, np.int32(n)))
    weights = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, weights / weights.sum(1, keepdims=True), rtol=2e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_histogram(module, random, seed):
    x = random.integers(0, 16, 500).astype(np.int32)
    bins = np.zeros(16, np.uint32)
    with schedule(seed):
        module.get_function("histogram")((8,), (64,), (x, bins, np.int32(500)))
    assert (bins == np.bincount(x, minlength=16)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_distinct_tokens(module, random, seed):
    ids = random.integers(0, 100, 80).astype(np.int32)
    count = np.zeros(1, np.int32)
    with schedule(seed):
        kernel = module.get_function("distinct")
        kernel((1,), (64,), (ids, count, np.int32(80), np.int32(100)), shared_mem=16)
    assert count[0] == len(set(ids.tolist()))
