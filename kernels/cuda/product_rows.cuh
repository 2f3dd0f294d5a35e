// Rows of products in FP8: e4m3 codes, and for each row a float scale, its largest absolute number / 448.
//
// Every kernel that rounds rows does it here, so that a row has the same codes whoever rounds it.  A row
// that is not finite has codes of 0 and the scale NaN: so is all that it is multiplied with.
#pragma once

#include "fp8.cuh"

using Rounded = __nv_bfloat16;  // what rows are rounded to first: the activations' dtype

constexpr float LARGEST_CODE = 448.0f;
constexpr float LEAST_PEAK = 1e-30f;  // a row of zeros has a scale too, and 448 / LEAST_PEAK is finite

// inverse: what a number is multiplied with before it is rounded; 0 where the row is not finite.
struct RowScale {
  float scale, inverse;
};

// Of the row whose largest absolute number has these bits.
__device__ __forceinline__ RowScale row_scale(unsigned peak) {
  if (peak >= INFINITE) return {not_a_number(), 0.0f};
  const float largest = fmaxf(__uint_as_float(peak), LEAST_PEAK);
  return {largest / LARGEST_CODE, LARGEST_CODE / largest};
}

// Bits that are larger for larger numbers, infinity and then NaN last.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The codes of two numbers, the first in the low byte.
__device__ __forceinline__ unsigned two_codes(float x, float y) {
#if !defined(CUDA_ON_HOST) && __CUDA_ARCH__ >= 890
  unsigned short both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(y), "f"(x));
  return both;
#else
  return nearest_code(x) | nearest_code(y) << 8;
#endif
}

// The codes of numbers of a row, side by side.
template <int N>
__device__ __forceinline__ void store_codes(Fp8* to, const float (&x)[N], float inverse) {
  if constexpr (N == 1) {
    *to = inverse == 0.0f ? 0 : static_cast<Fp8>(two_codes(x[0] * inverse, 0.0f));
  } else {
    static_assert(N % 4 == 0, "whole words");
    Vector<unsigned, N / 4> words;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float* const four = x + 4 * i;
      const unsigned low = two_codes(four[0] * inverse, four[1] * inverse);
      const unsigned high = two_codes(four[2] * inverse, four[3] * inverse);
      words.at[i] = inverse == 0.0f ? 0 : low | high << 16;
    }
    *reinterpret_cast<Vector<unsigned, N / 4>*>(to) = words;
  }
}
