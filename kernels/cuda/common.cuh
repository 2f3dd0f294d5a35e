// Shared by all kernels here: storage types, wide loads, sums over warps and blocks.
//
// Storage is __half, __nv_bfloat16 or float; every sum is taken in float.  Blocks have whole warps,
// a row's threads along x.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using int64 = long long;
using uint64 = unsigned long long;

constexpr int WARP = 32;
constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int WIDE_BYTES = 16;  // of the widest load and store a thread can do

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// N neighbours, loaded and stored at once; the address must be a multiple of their size.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T at[N];
};

template <typename T>
constexpr int WIDE = WIDE_BYTES / sizeof(T);  // elements of a whole load

template <int N, typename T>
__device__ __forceinline__ void load(const T* from, float (&to)[N]) {
  const Vector<T, N> raw = *reinterpret_cast<const Vector<T, N>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = widen(raw.at[i]);
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const float (&from)[N]) {
  Vector<T, N> raw;
#pragma unroll
  for (int i = 0; i < N; ++i) raw.at[i] = narrow<T>(from[i]);
  *reinterpret_cast<Vector<T, N>*>(to) = raw;
}

// So many words as one load brings them.  They leave the caches first, because most are read once.
template <int N>
__device__ __forceinline__ void load_words(const void* from, Vector<unsigned, N>& to) {
  if constexpr (N == 4) {
    const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(from));
    to.at[0] = raw.x, to.at[1] = raw.y, to.at[2] = raw.z, to.at[3] = raw.w;
  } else if constexpr (N == 2) {
    const uint2 raw = __ldcs(reinterpret_cast<const uint2*>(from));
    to.at[0] = raw.x, to.at[1] = raw.y;
  } else {
    static_assert(N == 1, "loads of 4, 8 and 16 bytes");
    to.at[0] = __ldcs(reinterpret_cast<const unsigned*>(from));
  }
}

// Prefetch so many bytes of global memory into the cache that all multiprocessors share; no thread
// waits for them.  Address and bytes: multiples of 16.  For GPUs that prefetch in bulk.
__device__ __forceinline__ void fetch_ahead(const void* from, int bytes) {
#if defined(CUDA_ON_HOST)
  cuda_host::prefetch_l2(from, bytes);
#elif __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
               :
               : "l"(__cvta_generic_to_global(from)), "r"(bytes));
#endif
}

// Adds to a number that blocks share, and returns what it was.  What a block that added earlier wrote
// before it is seen by what a block that adds later reads after it.  It needs no fence beside it (PTX
// ISA, memory consistency model: a release and an acquire, ordered through the barriers of a block).
__device__ __forceinline__ int add_acq_rel(int* at, int value) {
#ifdef CUDA_ON_HOST
  return cuda_host::add_acq_rel(at, value);
#else
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(at)), "r"(value)
               : "memory");
  return before;
#endif
}

// The same number, without the compiler's knowing it: what follows from it is computed where it stands.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Sums and maxima by a butterfly: always the same tree, and the same bits in every lane.
// LANES neighbours (a power of two) reduce among themselves; all lanes of the warp must come.
template <int LANES = WARP, typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(WHOLE_WARP, x, step);
  return x;
}

// The same sums, bit for bit, of N numbers at once (a power of two, at most LANES): lane i of its LANES
// gets that of number i * N / LANES.  Half the numbers go to the other half of the lanes at each step:
// N shuffles and a few, where N butterflies take several times as many.
template <int LANES, int N>
__device__ __forceinline__ float warp_sums(float (&x)[N]) {
  static_assert(N <= LANES, "a lane has one sum");
  int step = LANES / 2;
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2, step /= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = __shfl_xor_sync(WHOLE_WARP, upper ? x[i] : x[i + half], step);
      x[i] = (upper ? x[i + half] : x[i]) + other;
    }
  }
  return warp_sum<LANES / N>(x[0]);
}

template <int LANES = WARP>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, step));
  }
  return x;
}

__device__ __forceinline__ unsigned warp_max(unsigned x) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(WHOLE_WARP, x, step));
  return x;
}

// Sum over the WARPS warps along x, for every thread.  One warp needs no barrier.
template <int WARPS, typename T>
__device__ __forceinline__ T block_sum(T x) {
  x = warp_sum(x);
  if constexpr (WARPS > 1) {
    static_assert(WARPS <= WARP, "the sums of the warps are added up by one warp");
    __shared__ T sums[WARPS];
    const int lane = threadIdx.x % WARP;
    __syncthreads();  // the reads of an earlier call are over
    if (lane == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    x = warp_sum(lane < WARPS ? sums[lane] : T(0));
  }
  return x;
}

template <int WARPS, typename T>
__device__ __forceinline__ T block_max(T x) {
  x = warp_max(x);
  if constexpr (WARPS > 1) {
    static_assert(WARPS <= WARP, "the maxima of the warps are compared by one warp");
    __shared__ T maxima[WARPS];
    const int lane = threadIdx.x % WARP;
    __syncthreads();
    if (lane == 0) maxima[threadIdx.x / WARP] = x;
    __syncthreads();
    x = warp_max(lane < WARPS ? maxima[lane] : maxima[0]);
  }
  return x;
}
