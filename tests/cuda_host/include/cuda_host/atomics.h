// Atomic functions. Threads change places only inside the runtime, so load, change and store are
// one step here; what matters is that the runtime sees the access as atomic.
#pragma once

#include "cuda_host/qualifiers.h"
#include "cuda_host/runtime_calls.h"

namespace cuda_host {

template <class T, class Change>
CUDA_HOST_UNSEEN T atomic_update(T* address, Change change) {
  cuda_host_atomic(address, sizeof(T), __builtin_return_address(0));
  const T old = *address;
  *address = change(old);
  return old;
}

}  // namespace cuda_host

#define CUDA_HOST_ATOMIC(name, type, expression)                                                  \
  __forceinline__ type name(type* address, type value) {                                          \
    return cuda_host::atomic_update(                                                              \
        address, [value](type old) -> type { return expression; });                               \
  }
#define CUDA_HOST_ATOMIC_INTEGER(type)                                                            \
  CUDA_HOST_ATOMIC(atomicAdd, type, old + value)                                                  \
  CUDA_HOST_ATOMIC(atomicExch, type, value)                                                       \
  CUDA_HOST_ATOMIC(atomicMin, type, value < old ? value : old)                                    \
  CUDA_HOST_ATOMIC(atomicMax, type, old < value ? value : old)                                    \
  CUDA_HOST_ATOMIC(atomicAnd, type, old & value)                                                  \
  CUDA_HOST_ATOMIC(atomicOr, type, old | value)                                                   \
  CUDA_HOST_ATOMIC(atomicXor, type, old ^ value)                                                  \
  __forceinline__ type atomicCAS(type* address, type expected, type value) {                      \
    return cuda_host::atomic_update(address, [expected, value](type old) -> type {                \
      return old == expected ? value : old;                                                       \
    });                                                                                           \
  }
CUDA_HOST_ATOMIC_INTEGER(int)
CUDA_HOST_ATOMIC_INTEGER(unsigned)
CUDA_HOST_ATOMIC_INTEGER(unsigned long long)
CUDA_HOST_ATOMIC(atomicSub, int, old - value)
CUDA_HOST_ATOMIC(atomicSub, unsigned, old - value)
CUDA_HOST_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
CUDA_HOST_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
CUDA_HOST_ATOMIC(atomicAdd, float, old + value)
CUDA_HOST_ATOMIC(atomicExch, float, value)
CUDA_HOST_ATOMIC(atomicAdd, double, old + value)
#undef CUDA_HOST_ATOMIC_INTEGER
#undef CUDA_HOST_ATOMIC

namespace cuda_host {

// Stands in for atom.acq_rel.gpu.add.  It is as strong as fences on both sides, which order more: also
// what other atomics of the thread publish and read.
template <class T>
__forceinline__ T add_acq_rel(T* address, T value) {
  cuda_host_fence();
  const T old = atomicAdd(address, value);
  cuda_host_fence();
  return old;
}

}  // namespace cuda_host
