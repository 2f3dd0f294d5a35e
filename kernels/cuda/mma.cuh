// D += A B by a warp's tensor cores, float sums of 16-bit products: A [16, 16], B [16, 8], D [16, 8]
// (PTX ISA, mma.m16n8k16).
//
// Lane 4 r + q holds, two to a register, the inputs 2 q and 2 q + 1 of A's rows r and r + 8 (a[0],
// a[1]) and of B's column r (b[0]), the inputs 2 q + 8 and 2 q + 9 of the same (a[2], a[3], b[1]),
// and D's columns 2 q and 2 q + 1 of row r (d[0], d[1]) and of row r + 8 (d[2], d[3]).
#pragma once

#include "common.cuh"

#ifdef CUDA_ON_HOST

template <typename T>
__device__ __forceinline__ void multiply_tile(float (&d)[4], const unsigned (&a)[4],
                                              const unsigned (&b)[2]) {
  cuda_host::mma_m16n8k16<T>(d, a, b);
}

#else

template <typename T>
__device__ void multiply_tile(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

#define NIGHTJAR_MULTIPLY_TILE(type, name)                                                    \
  template <>                                                                                 \
  __device__ __forceinline__ void multiply_tile<type>(float (&d)[4], const unsigned (&a)[4],  \
                                                      const unsigned (&b)[2]) {               \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name ".f32 "               \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"            \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));         \
  }
NIGHTJAR_MULTIPLY_TILE(__half, "f16")
NIGHTJAR_MULTIPLY_TILE(__nv_bfloat16, "bf16")
#undef NIGHTJAR_MULTIPLY_TILE

#endif
