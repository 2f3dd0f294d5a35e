"""The CUDA that the host offers: 16-bit floats, warp functions, atomics, intrinsics, memory."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cuda_host import RawModule, schedule

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>

template <class T>
__global__ void narrow(const float* x, T* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = T(x[i]);
}
template <class T>
__global__ void widen(const T* x, float* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = float(x[i]);
}
// out[k][i] is the k-th operation on a[i], b[i], c[i].
template <class T>
__global__ void arithmetic(const T* a, const T* b, const T* c, T* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const T results[] = {a[i] + b[i], a[i] - b[i], a[i] * b[i], a[i] / b[i], -a[i],
                         __habs(a[i]), __hmax(a[i], b[i]), __hmin(a[i], b[i]),
                         __hfma(a[i], b[i], c[i])};
    for (int k = 0; k < 9; ++k) out[k * n + i] = results[k];
  }
}
extern "C" __global__ void half_pairs(const __half2* x, __half2* out, float2* wide) {
  const int i = threadIdx.x;
  const __half2 one = __float2half2_rn(1.0f);
  out[i] = __hadd2(__hmul2(x[i], x[i]), __hfma2(x[i], one, one));
  wide[i] = make_float2(__low2float(x[i]), __half22float2(x[i]).y);
}
extern "C" __global__ void bfloat_pairs(const __nv_bfloat162* x, __nv_bfloat162* out,
                                        float2* wide) {
  const int i = threadIdx.x;
  out[i] = x[i] + __floats2bfloat162_rn(1.0f, 2.0f);
  wide[i] = __bfloat1622float2(x[i]);
}

enum { kIndexed, kUp, kDown, kXor };
extern "C" __global__ void shuffle(const int* x, int* out, int kind, int by, int width) {
  const int value = x[threadIdx.x];
  int got = 0;
  if (kind == kIndexed) got = __shfl_sync(0xffffffffu, value, by, width);
  if (kind == kUp) got = __shfl_up_sync(0xffffffffu, value, by, width);
  if (kind == kDown) got = __shfl_down_sync(0xffffffffu, value, by, width);
  if (kind == kXor) got = __shfl_xor_sync(0xffffffffu, value, by, width);
  out[threadIdx.x] = got;
}
template <class T>
__global__ void rotate(const T* x, T* out) {
  out[threadIdx.x] = __shfl_sync(0xffffffffu, x[threadIdx.x], threadIdx.x + 1);
}
extern "C" __global__ void votes(const int* x, unsigned* out) {
  const int i = threadIdx.x, value = x[i];
  const unsigned all = 0xffffffffu;
  unsigned* mine = out + i * 8;
  mine[0] = __ballot_sync(all, value > 0);
  mine[1] = __any_sync(all, value > 0);
  mine[2] = __all_sync(all, value > 0);
  mine[3] = __match_any_sync(all, value);
  mine[4] = __reduce_add_sync(all, value);
  mine[5] = __reduce_max_sync(all, value);
  mine[6] = __reduce_min_sync(all, value);
  mine[7] = __reduce_xor_sync(all, unsigned(value));
}
extern "C" __global__ void block_votes(const int* x, int* out) {
  out[3 * threadIdx.x] = __syncthreads_count(x[threadIdx.x]);
  out[3 * threadIdx.x + 1] = __syncthreads_or(x[threadIdx.x]);
  out[3 * threadIdx.x + 2] = __syncthreads_and(x[threadIdx.x]);
}

// A [16, 16] times B [16, 8] plus D [16, 8], the fragments gathered as PTX ISA numbers them.
// Element i of A is at row r + 8 (i % 4 > 1), column 2 q + i % 2 + 8 (i > 3), of B at row
// 2 q + i % 2 + 8 (i > 1), column r, of D at row r + 8 (i > 1), column 2 q + i % 2.
template <class T>
__global__ void tensor_core(const T* a, const T* b, float* d) {
  const int r = threadIdx.x / 4, q = threadIdx.x % 4;
  T as[8], bs[4];
  unsigned a_words[4], b_words[2];
  float ds[4];
  for (int i = 0; i < 8; ++i) as[i] = a[(r + 8 * (i % 4 > 1)) * 16 + 2 * q + i % 2 + 8 * (i > 3)];
  for (int i = 0; i < 4; ++i) bs[i] = b[(2 * q + i % 2 + 8 * (i > 1)) * 8 + r];
  for (int i = 0; i < 4; ++i) ds[i] = d[(r + 8 * (i > 1)) * 8 + 2 * q + i % 2];
  memcpy(a_words, as, sizeof a_words);
  memcpy(b_words, bs, sizeof b_words);
  __syncwarp();
  cuda_host::mma_m16n8k16<T>(ds, a_words, b_words);
  for (int i = 0; i < 4; ++i) d[(r + 8 * (i > 1)) * 8 + 2 * q + i % 2] = ds[i];
}

extern "C" __global__ void integer_atomics(int* at, const int* x) {
  const int value = x[threadIdx.x];
  atomicAdd(at, value), atomicSub(at + 1, value), atomicMin(at + 2, value);
  atomicMax(at + 3, value), atomicAnd(at + 4, value), atomicOr(at + 5, value);
  atomicXor(at + 6, value), atomicExch(at + 7, 9);
  unsigned* rounds = reinterpret_cast<unsigned*>(at) + 8;
  atomicInc(rounds, 4), atomicDec(rounds + 1, 4);
}
extern "C" __global__ void largest_by_compare_and_swap(float* at, const float* x) {
  int* bits = reinterpret_cast<int*>(at);
  int seen = atomicAdd(bits, 0);
  while (__int_as_float(seen) < x[threadIdx.x]) {
    const int before = atomicCAS(bits, seen, __float_as_int(x[threadIdx.x]));
    if (before == seen) break;
    seen = before;
  }
}
extern "C" __global__ void other_atomics(float* f, double* d, unsigned long long* u) {
  atomicAdd(f, 0.5f), atomicAdd(d, 0.25), atomicMax(u, 1ull << 40 | threadIdx.x);
}

extern "C" __global__ void bits(const unsigned* x, int* out, unsigned long long* wide) {
  const unsigned a = x[0], b = x[1];
  out[0] = __popc(a), out[1] = __clz(a), out[2] = __ffs(a), out[3] = __brev(a);
  out[4] = __umulhi(a, b), out[5] = __mulhi(int(a), int(b)), out[6] = __funnelshift_l(a, b, 5);
  out[7] = __funnelshift_r(a, b, 5), out[8] = __float_as_int(1.0f), out[9] = __clz(0);
  wide[0] = __umul64hi(0x123456789abcdef0ull * a, 0xfedcba9876543210ull * b);
}
extern "C" __global__ void reals(const float* x, float* out) {
  const float a = x[0], b = x[1];
  out[0] = __expf(a), out[1] = __logf(b), out[2] = rsqrtf(b), out[3] = __fdividef(a, b);
  out[4] = fmaf(a, b, b), out[5] = exp2f(a), out[6] = erff(a), out[7] = tanhf(a);
  out[8] = min(a, b), out[9] = max(3, 7u), out[10] = __saturatef(a), out[11] = __log2f(b);
  out[12] = CUDART_INF_F;
}
extern "C" __global__ void vectors(const float4* x, uint4* out, int2* pair) {
  const float4 v = __ldg(x + threadIdx.x);
  out[threadIdx.x] = make_uint4(unsigned(v.x), unsigned(v.y), unsigned(v.z), unsigned(v.w));
  __stcs(pair + threadIdx.x, make_int2(-1, int(v.w)));
}
static_assert(sizeof(float4) == 16 && alignof(float4) == 16 && alignof(float3) == 4, "as in CUDA");

__constant__ float squares[4] = {0, 1, 4, 9};
__device__ int launches = 0;
extern "C" __global__ void memory_kinds(float* out, int* count) {
  extern __shared__ float first[];
  extern __shared__ int second[];  // the same memory
  if (threadIdx.x == 0) second[0] = 0x3f800000;
  __syncthreads();
  if (threadIdx.x == 0) count[0] = ++launches;
  out[threadIdx.x] = first[0] + squares[threadIdx.x];
}

template <int kSize>
__device__ int* scratch() {
  __shared__ int room[kSize];
  return room;
}
extern "C" __global__ void shared_of_templates(int* out) {
  int *a = scratch<4>(), *b = scratch<8>();
  if (threadIdx.x == 0) a[3] = 1, b[0] = 2, b[7] = 3;
  __syncthreads();
  out[0] = a == scratch<4>() ? a[3] * 100 + b[0] * 10 + b[7] : -1;
}

extern "C" __global__ void where_am_i(int* out) {
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  out[block * threads + thread] = block * 1000 + thread;
}
"""
NAMES = [
    *(
        f"{name}<{t}>"
        for name in ("narrow", "widen", "arithmetic", "tensor_core")
        for t in ("half", "nv_bfloat16")
    ),
    *(f"rotate<{t}>" for t in ("double", "long long", "half", "nv_bfloat162", "unsigned char")),
]
DTYPES = pytest.mark.parametrize(
    ("dtype", "ctype"), [(torch.float16, "half"), (torch.bfloat16, "nv_bfloat16")]
)
LANES = np.arange(32)


@pytest.fixture(scope="module")
def module():
    return RawModule(SOURCE, name_expressions=NAMES)


def same_bits(given, wanted):
    """Equal to the last bit; any NaN equals any NaN."""
    assert torch.equal(given.isnan(), wanted.isnan())
    as_int = torch.int16 if given.element_size() == 2 else torch.int32
    number = ~wanted.isnan()
    assert torch.equal(given.view(as_int)[number], wanted.view(as_int)[number])


def every_pattern(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


@DTYPES
def test_every_small_float_widens(module, dtype, ctype):
    x = every_pattern(dtype)
    out = torch.empty(len(x))
    module.get_function(f"widen<{ctype}>")((1,), (64,), (x, out, np.int32(len(x))))
    same_bits(out, x.float())


@DTYPES
def test_floats_narrow_to_the_nearest_ties_to_even(module, dtype, ctype):
    x = every_pattern(dtype).float()
    x = x[x.isfinite()].sort().values
    middles = (x[:-1].double() / 2 + x[1:].double() / 2).float()
    near = [torch.nextafter(middles, torch.tensor(to)) for to in (-math.inf, math.inf)]
    values = torch.cat([x, middles, *near, torch.tensor([math.nan, math.inf, 3e38, -1e-45])])
    out = torch.empty(len(values), dtype=dtype)
    module.get_function(f"narrow<{ctype}>")((1,), (64,), (values, out, np.int32(len(values))))
    same_bits(out, values.to(dtype))


@DTYPES
def test_arithmetic_rounds_the_exact_result_once(module, dtype, ctype):
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(3000, generator=generator).to(dtype) for _ in range(3))
    out = torch.empty(9, 3000, dtype=dtype)
    module.get_function(f"arithmetic<{ctype}>")((1,), (32,), (a, b, c, out, np.int32(3000)))
    fused = (a.double() * b.double() + c.double()).to(dtype)
    wanted = [a + b, a - b, a * b, a / b, -a, a.abs(), torch.maximum(a, b), torch.minimum(a, b)]
    for given_row, wanted_row in zip(out[:8], wanted, strict=True):
        same_bits(given_row, wanted_row)
    # torch narrows a double by way of float, which may round twice: one step apart where it did.
    apart = (out[8].view(torch.int16).int() - fused.view(torch.int16).int()).abs()
    assert apart.max() <= 1
    assert (apart == 0).float().mean() > 0.99


def test_pairs_of_halves(module):
    x = torch.randn(32, 2).half()
    out, wide = torch.empty_like(x), torch.empty(32, 2)
    module.get_function("half_pairs")((1,), (32,), (x, out, wide))
    same_bits(out, x * x + (x + 1))
    same_bits(wide, x.float())


def test_pairs_of_bfloats(module):
    x = torch.randn(32, 2).bfloat16()
    out, wide = torch.empty_like(x), torch.empty(32, 2)
    module.get_function("bfloat_pairs")((1,), (32,), (x, out, wide))
    same_bits(out, x + torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    same_bits(wide, x.float())


def source_lanes(kind, by, width):
    """Which lane each lane reads (CUDA C++ Programming Guide, warp shuffle functions)."""
    first = LANES // width * width
    if kind == "indexed":
        return first + by % width
    if kind == "up":
        return np.where(LANES - by >= first, LANES - by, LANES)
    if kind == "down":
        return np.where(LANES + by < first + width, LANES + by, LANES)
    return np.where((LANES ^ by) < first + width, LANES ^ by, LANES)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["indexed", "up", "down", "xor"]),
    by=st.integers(0, 31),
    width=st.sampled_from([1, 2, 4, 8, 16, 32]),
    seed=st.integers(0, 5),
)
def test_shuffles(module, kind, by, width, seed):
    x = (LANES * 7 + 3).astype(np.int32)
    out = np.zeros(32, np.int32)
    number = np.int32(["indexed", "up", "down", "xor"].index(kind))
    with schedule(seed):
        args = (x, out, number, np.int32(by), np.int32(width))
        module.get_function("shuffle")((1,), (32,), args)
    assert (out == x[source_lanes(kind, by, width)]).all()


@pytest.mark.parametrize(
    ("ctype", "x"),
    [
        ("double", torch.randn(32, dtype=torch.float64)),
        ("long long", torch.arange(32) << 40),
        ("half", torch.randn(32).half()),
        ("nv_bfloat162", torch.randn(32, 2).bfloat16()),
        ("unsigned char", torch.arange(32, dtype=torch.uint8)),
    ],
)
def test_what_a_shuffle_can_carry(module, ctype, x):
    out = torch.zeros_like(x)
    with schedule(3):
        module.get_function(f"rotate<{ctype}>")((1,), (32,), (x, out))
    assert torch.equal(out, x.roll(-1, 0))


@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.integers(-3, 3), min_size=32, max_size=32), seed=st.integers(0, 5))
def test_votes_and_warp_reductions(module, values, seed):
    x = np.array(values, np.int32)
    out = np.zeros((32, 8), np.uint32)
    with schedule(seed):
        module.get_function("votes")((1,), (32,), (x, out))
    weights = np.uint64(1) << LANES.astype(np.uint64)
    assert (out[:, 0] == weights[x > 0].sum()).all()
    assert (out[:, 1] == (x > 0).any()).all()
    assert (out[:, 2] == (x > 0).all()).all()
    assert out[:, 3].tolist() == [weights[x == value].sum() for value in x]
    assert (out[:, 4].astype(np.int32) == x.sum()).all()
    assert (out[:, 5].astype(np.int32) == x.max()).all()
    assert (out[:, 6].astype(np.int32) == x.min()).all()
    assert (out[:, 7] == np.bitwise_xor.reduce(x.view(np.uint32))).all()


@DTYPES
@pytest.mark.parametrize("seed", range(3))
def test_a_tensor_cores_product(module, dtype, ctype, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(16, n, generator=generator).to(dtype) for n in (16, 8))
    d = torch.randn(16, 8, generator=generator)
    wanted = (d.double() + a.double() @ b.double()).float()
    with schedule(seed):
        module.get_function(f"tensor_core<{ctype}>")((1,), (32,), (a, b, d))
    torch.testing.assert_close(d, wanted, rtol=2**-23, atol=1e-7)


@pytest.mark.parametrize("ones", [0, 1, 40, 64])
def test_barriers_that_count(module, ones):
    x = (np.arange(64) < ones).astype(np.int32)
    out = np.zeros((64, 3), np.int32)
    with schedule(2):
        module.get_function("block_votes")((1,), (64,), (x, out))
    assert (out == [ones, ones > 0, ones == 64]).all()


def test_integer_atomics(module):
    x = np.arange(3, 43).astype(np.int32)
    at = np.array([0, 0, 99, 0, -1, 0, 0, 0, 0, 0], np.int32)
    with schedule(1):
        module.get_function("integer_atomics")((1,), (40,), (at, x))
    fold = [x.sum(), -x.sum(), 3, 42, *(f.reduce(x) for f in (np.bitwise_and, np.bitwise_or))]
    # Inc counts 0 to 4 and wraps, Dec from 4 down: 40 steps are whole rounds.
    assert at.tolist() == [*fold, np.bitwise_xor.reduce(x), 9, 0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_compare_and_swap(module, seed):
    x = np.random.default_rng(seed).permutation(64).astype(np.float32)
    at = np.zeros(1, np.float32)
    with schedule(seed):
        module.get_function("largest_by_compare_and_swap")((1,), (64,), (at, x))
    assert at[0] == 63


def test_atomics_of_other_types(module):
    f, d, u = np.zeros(1, np.float32), np.zeros(1), np.zeros(1, np.uint64)
    module.get_function("other_atomics")((1,), (64,), (f, d, u))
    assert (f[0], d[0], u[0]) == (32, 16, (1 << 40) + 63)


@settings(max_examples=40, deadline=None)
@given(a=st.integers(1, 2**32 - 1), b=st.integers(0, 2**32 - 1))
def test_bit_functions(module, a, b):
    out, wide = np.zeros(10, np.int32), np.zeros(1, np.uint64)
    module.get_function("bits")((1,), (1,), (np.array([a, b], np.uint32), out, wide))
    signed = [n - (n >> 31 << 32) for n in (a, b)]
    wanted = [
        a.bit_count(),
        32 - a.bit_length(),
        (a & -a).bit_length(),
        int(f"{a:032b}"[::-1], 2),
        a * b >> 32,
        signed[0] * signed[1] >> 32,
        (b << 32 | a) << 5 >> 32,
        (b << 32 | a) >> 5,
        0x3F800000,
        32,
    ]
    assert out.view(np.uint32).tolist() == [n & 0xFFFFFFFF for n in wanted]
    left, right = 0x123456789ABCDEF0 * a % 2**64, 0xFEDCBA9876543210 * b % 2**64
    assert wide[0] == left * right >> 64


def test_functions_of_reals(module):
    a, b = 0.75, 2.5
    out = np.zeros(13, np.float32)
    module.get_function("reals")((1,), (1,), (np.array([a, b], np.float32), out))
    wanted = [math.exp(a), math.log(b), b**-0.5, a / b, a * b + b, 2**a, math.erf(a)]
    wanted += [math.tanh(a), a, 7, a, math.log2(b), math.inf]
    np.testing.assert_allclose(out, wanted, rtol=3e-7)


def test_vector_types(module):
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    out, pair = np.zeros((4, 4), np.uint32), np.zeros((4, 2), np.int32)
    module.get_function("vectors")((1,), (4,), (x, out, pair))
    assert (out == x).all()
    assert pair.tolist() == [[-1, 3], [-1, 7], [-1, 11], [-1, 15]]


def test_constant_device_and_dynamic_shared_memory(module):
    kernel = module.get_function("memory_kinds")
    out, count = np.zeros(4, np.float32), np.zeros(1, np.int32)
    for launch in (1, 2):
        kernel((1,), (4,), (out, count), shared_mem=4)
        assert count[0] == launch
    assert out.tolist() == [1, 2, 5, 10]


def test_each_instance_of_a_template_has_its_own_shared_memory(module):
    out = np.zeros(1, np.int32)
    module.get_function("shared_of_templates")((1,), (1,), (out,))
    assert out[0] == 123


def test_the_indices_of_a_three_dimensional_launch(module):
    out = np.zeros(24 * 30, np.int32)
    with schedule(4):
        module.get_function("where_am_i")((2, 3, 4), (5, 3, 2), (out,))
    assert out.tolist() == [1000 * block + thread for block in range(24) for thread in range(30)]
