// The words CUDA adds to C++.
#pragma once

// Defined here and by no CUDA compiler: kernels may choose a plain path where one needs hardware.
#define CUDA_ON_HOST 1

// Not inlined, so that a kernel keeps its name in reports; also how the driver finds kernels.
#define __global__ __attribute__((noinline, noclone))
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
// One block runs at a time, on one thread of the operating system. `thread_local` puts the shared
// variables of all kernels side by side, may stand in templates, and, unlike `static`, also behind
// `extern`, for dynamic shared memory.
#define __shared__ thread_local

#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// Code of the host itself: its loads and stores are not the kernel's.
#define CUDA_HOST_UNSEEN __attribute__((noinline, no_sanitize("thread", "alignment", "bounds")))
