// Device functions of one thread: arithmetic, bits, cached loads. What CUDA computes approximately
// (__expf and others) is computed here as the host's library does.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "cuda_host/sync.h"

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void __sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// As CUDA's overloads: arithmetic types mix by the usual conversions.
template <class A, class B>
constexpr auto min(A a, B b) -> decltype(a + b) {
  using Common = decltype(a + b);
  return Common(b) < Common(a) ? Common(b) : Common(a);
}
template <class A, class B>
constexpr auto max(A a, B b) -> decltype(a + b) {
  using Common = decltype(a + b);
  return Common(a) < Common(b) ? Common(b) : Common(a);
}
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline int __float_as_int(float x) { return cuda_host::from_bits<int>(cuda_host::to_bits(x)); }
inline unsigned __float_as_uint(float x) {
  return cuda_host::from_bits<unsigned>(cuda_host::to_bits(x));
}
inline float __int_as_float(int x) { return cuda_host::from_bits<float>(cuda_host::to_bits(x)); }
inline float __uint_as_float(unsigned x) {
  return cuda_host::from_bits<float>(cuda_host::to_bits(x));
}
inline long long __double_as_longlong(double x) {
  return cuda_host::from_bits<long long>(cuda_host::to_bits(x));
}
inline double __longlong_as_double(long long x) {
  return cuda_host::from_bits<double>(cuda_host::to_bits(x));
}
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) {
  return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
  return reversed;
}
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32);
}
inline int __mulhi(int x, int y) {
  return static_cast<int>(static_cast<int64_t>(x) * y >> 32);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}

// Cache hints change nothing here.
#define CUDA_HOST_LOAD(name)                     \
  template <class T>                             \
  __forceinline__ T name(const T* address) {     \
    return *address;                             \
  }
CUDA_HOST_LOAD(__ldg)
CUDA_HOST_LOAD(__ldca)
CUDA_HOST_LOAD(__ldcg)
CUDA_HOST_LOAD(__ldcs)
#undef CUDA_HOST_LOAD

namespace cuda_host {

// PTX's cp.async.bulk.prefetch.L2: nothing is read, but all of it must be there.
CUDA_HOST_UNSEEN inline void prefetch_l2(const void* from, int bytes) {
  cuda_host_prefetch(from, bytes, __builtin_return_address(0));
}

}  // namespace cuda_host

#define CUDA_HOST_STORE(name)                          \
  template <class T>                                   \
  __forceinline__ void name(T* address, T value) {     \
    *address = value;                                  \
  }
CUDA_HOST_STORE(__stwb)
CUDA_HOST_STORE(__stcg)
CUDA_HOST_STORE(__stcs)
#undef CUDA_HOST_STORE
