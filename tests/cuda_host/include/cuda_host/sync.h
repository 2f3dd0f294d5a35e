// Barriers, warp shuffles, votes. Each is inlined, so that the runtime sees the kernel's place.
#pragma once

#include "cuda_host/qualifiers.h"
#include "cuda_host/runtime_calls.h"

constexpr int warpSize = 32;

__forceinline__ void __syncthreads() { cuda_host_barrier(0); }
__forceinline__ int __syncthreads_count(int predicate) {
  return static_cast<int>(cuda_host_barrier(predicate != 0));
}
__forceinline__ int __syncthreads_or(int predicate) {
  return cuda_host_barrier(predicate != 0) != 0;
}
__forceinline__ int __syncthreads_and(int predicate) {
  return cuda_host_barrier(predicate == 0) == 0;
}
__forceinline__ void __syncwarp(unsigned mask = 0xffffffffu) {
  cuda_host_warp(CUDA_HOST_WARP_SYNC, mask, 0, 0, nullptr);
}
__forceinline__ void __threadfence() { cuda_host_fence(); }
__forceinline__ void __threadfence_system() { cuda_host_fence(); }

namespace cuda_host {

template <class T>
__forceinline__ uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a lane exchanges at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
__forceinline__ T from_bits(uint64_t bits) {
  T value;
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
__forceinline__ T shuffle(unsigned mask, T value, unsigned source_lane) {
  return from_bits<T>(
      cuda_host_warp(CUDA_HOST_WARP_SHUFFLE, mask, to_bits(value), source_lane, nullptr));
}

// Lanes exchange inside segments of `width`; a source outside of one's segment is oneself.
__forceinline__ unsigned own_segment_or_self(int source, int width) {
  const int lane = static_cast<int>(cuda_host_lane());
  const int first = lane & ~(width - 1);
  return static_cast<unsigned>(source >= first && source < first + width ? source : lane);
}

template <class T>
uint64_t add(uint64_t a, uint64_t b) {
  return to_bits(static_cast<T>(from_bits<T>(a) + from_bits<T>(b)));
}
template <class T>
uint64_t smaller(uint64_t a, uint64_t b) {
  return from_bits<T>(a) < from_bits<T>(b) ? a : b;
}
template <class T>
uint64_t larger(uint64_t a, uint64_t b) {
  return from_bits<T>(a) < from_bits<T>(b) ? b : a;
}
inline uint64_t bit_and(uint64_t a, uint64_t b) { return a & b; }
inline uint64_t bit_or(uint64_t a, uint64_t b) { return a | b; }
inline uint64_t bit_xor(uint64_t a, uint64_t b) { return a ^ b; }

template <class T>
__forceinline__ T reduce(unsigned mask, T value, CudaHostCombine combine) {
  return from_bits<T>(cuda_host_warp(CUDA_HOST_WARP_REDUCE, mask, to_bits(value), 0, combine));
}

}  // namespace cuda_host

template <class T>
__forceinline__ T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
  const unsigned first = cuda_host_lane() & ~static_cast<unsigned>(width - 1);
  return cuda_host::shuffle(mask, value, first + (source & (width - 1)));
}
template <class T>
__forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int source = static_cast<int>(cuda_host_lane()) - static_cast<int>(delta);
  return cuda_host::shuffle(mask, value, cuda_host::own_segment_or_self(source, width));
}
template <class T>
__forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  const int source = static_cast<int>(cuda_host_lane() + delta);
  return cuda_host::shuffle(mask, value, cuda_host::own_segment_or_self(source, width));
}
template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize) {
  // Unlike the others, xor may reach into an earlier segment, but not into a later one.
  const int lane = static_cast<int>(cuda_host_lane());
  const int source = lane ^ lanes, end = (lane & ~(width - 1)) + width;
  return cuda_host::shuffle(mask, value, static_cast<unsigned>(source < end ? source : lane));
}

__forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(
      cuda_host_warp(CUDA_HOST_WARP_BALLOT, mask, predicate != 0, 0, nullptr));
}
__forceinline__ int __any_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
__forceinline__ int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
template <class T>
__forceinline__ unsigned __match_any_sync(unsigned mask, T value) {
  return static_cast<unsigned>(
      cuda_host_warp(CUDA_HOST_WARP_MATCH, mask, cuda_host::to_bits(value), 0, nullptr));
}

#define CUDA_HOST_REDUCE(type)                                                                    \
  __forceinline__ type __reduce_add_sync(unsigned mask, type value) {                             \
    return cuda_host::reduce(mask, value, cuda_host::add<type>);                                  \
  }                                                                                               \
  __forceinline__ type __reduce_min_sync(unsigned mask, type value) {                             \
    return cuda_host::reduce(mask, value, cuda_host::smaller<type>);                              \
  }                                                                                               \
  __forceinline__ type __reduce_max_sync(unsigned mask, type value) {                             \
    return cuda_host::reduce(mask, value, cuda_host::larger<type>);                               \
  }
CUDA_HOST_REDUCE(int)
CUDA_HOST_REDUCE(unsigned)
#undef CUDA_HOST_REDUCE
__forceinline__ unsigned __reduce_and_sync(unsigned mask, unsigned value) {
  return cuda_host::reduce(mask, value, cuda_host::bit_and);
}
__forceinline__ unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return cuda_host::reduce(mask, value, cuda_host::bit_or);
}
__forceinline__ unsigned __reduce_xor_sync(unsigned mask, unsigned value) {
  return cuda_host::reduce(mask, value, cuda_host::bit_xor);
}

__forceinline__ void __trap() { cuda_host_trap("__trap()"); }
#define CUDA_HOST_TEXT(expression) #expression
#undef assert
#define assert(expression) \
  ((expression) ? void() : cuda_host_trap("assert(" CUDA_HOST_TEXT(expression) ")"))
