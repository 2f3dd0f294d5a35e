// What kernels call of the runtime (runtime/*.cpp).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cuda_host/vector_types.h"

#define CUDA_HOST_RUNTIME __attribute__((visibility("hidden")))
#ifndef CUDA_HOST_BUILTIN  // the runtime itself defines it as nothing
#define CUDA_HOST_BUILTIN const
#endif

extern "C" {
// Constant to the kernel, as in CUDA; the scheduler sets them whenever it changes threads. A
// compiler that keeps one in a register over a switch is right: it is the same thread's.
extern CUDA_HOST_RUNTIME CUDA_HOST_BUILTIN uint3 threadIdx;
extern CUDA_HOST_RUNTIME CUDA_HOST_BUILTIN uint3 blockIdx;
extern CUDA_HOST_RUNTIME CUDA_HOST_BUILTIN dim3 blockDim;
extern CUDA_HOST_RUNTIME CUDA_HOST_BUILTIN dim3 gridDim;

// Lets every thread of the block arrive; each gets the sum of the values.
CUDA_HOST_RUNTIME uint32_t cuda_host_barrier(uint32_t value);

// Lets every lane of `mask` arrive with the same operation; `combine` is what reduce folds with.
enum CudaHostWarpOperation : uint32_t {
  CUDA_HOST_WARP_SYNC,
  CUDA_HOST_WARP_SHUFFLE,
  CUDA_HOST_WARP_BALLOT,
  CUDA_HOST_WARP_MATCH,
  CUDA_HOST_WARP_REDUCE,
};
typedef uint64_t (*CudaHostCombine)(uint64_t, uint64_t);
CUDA_HOST_RUNTIME uint64_t cuda_host_warp(CudaHostWarpOperation operation, uint32_t mask,
                                          uint64_t value, uint32_t source_lane,
                                          CudaHostCombine combine);
CUDA_HOST_RUNTIME uint32_t cuda_host_lane();

// An atomic read-modify-write is about to happen; `site` is the place in the kernel.
CUDA_HOST_RUNTIME void cuda_host_atomic(const void* address, size_t bytes, const void* site);
CUDA_HOST_RUNTIME void cuda_host_fence();
CUDA_HOST_RUNTIME void cuda_host_prefetch(const void* address, size_t bytes, const void* site);
[[noreturn]] CUDA_HOST_RUNTIME void cuda_host_trap(const char* text);
}
