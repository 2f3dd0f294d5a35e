// Keys and values in FP8: bytes of e4m3 numbers, and for each row of a head a power of two.
//
// An e4m3 number is a sign, 4 bits of exponent (bias 7) and 3 of mantissa, 448 at most.  The exponent e
// of a row stands for the factor 2 ** (e - 127); 0 is the factor 0, and 255 is NaN.  No code is NaN.
#pragma once

#include "common.cuh"

using Fp8 = unsigned char;

template <typename S>
constexpr bool IS_FP8 = sizeof(S) == 1;

constexpr int NAN_EXPONENT = 255;
constexpr unsigned INFINITE = 0x7f800000u;  // a number with these bits, or with more, is not finite

__device__ __forceinline__ float factor_of(int exponent) {
  return exponent == NAN_EXPONENT ? not_a_number() : __int_as_float(exponent << 23);
}

// Where the 7 bits of a code's exponent and mantissa go in T, counted from the top of its 16 bits; and
// the power of two by which T's bias exceeds e4m3's.
template <typename T>
struct Widening;
template <>
struct Widening<__half> {
  static constexpr int SHIFT = 1;
  __device__ static __half2 bias() { return __float2half2_rn(256.0f); }
  __device__ static __half2 times(__half2 x, __half2 y) { return __hmul2(x, y); }
  using Two = __half2;
};
template <>
struct Widening<__nv_bfloat16> {
  static constexpr int SHIFT = 4;
  __device__ static __nv_bfloat162 bias() { return __float2bfloat162_rn(0x1p120f); }
  __device__ static __nv_bfloat162 times(__nv_bfloat162 x, __nv_bfloat162 y) { return __hmul2(x, y); }
  using Two = __nv_bfloat162;
};

// Two codes, the first in the low byte, as two numbers of T in a register.  It is exact.
template <typename T>
__device__ __forceinline__ unsigned widen_codes(unsigned codes) {
#if !defined(CUDA_ON_HOST) && __CUDA_ARCH__ >= 890
  if constexpr (Widening<T>::SHIFT == 1) {
    unsigned both;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(static_cast<unsigned short>(codes)));
    return both;
  }
#endif
  const unsigned apart = (codes & 0xffu) << 8 | (codes & 0xff00u) << 16;
  const unsigned bits = (apart & 0x80008000u) | (apart & 0x7f007f00u) >> Widening<T>::SHIFT;
  using Two = typename Widening<T>::Two;
  const Two two = Widening<T>::times(reinterpret_cast<const Two&>(bits), Widening<T>::bias());
  return reinterpret_cast<const unsigned&>(two);
}

// The exponent of a row whose largest absolute number has these bits: the least for which no code is
// more than 448.
__device__ __forceinline__ int exponent_for(unsigned peak) {
  constexpr unsigned ABOVE_448 = (1u << 21) - 1;  // carries past 1.75 * 2 ** 8
  if (peak >= INFINITE) return NAN_EXPONENT;
  return max(1, static_cast<int>((peak + ABOVE_448) >> 23) - 8);
}

// The code that is nearest to x, which is 448 at most; of two, the even one.
__device__ __forceinline__ Fp8 nearest_code(float x) {
  const unsigned all = __float_as_uint(x);
  const unsigned bits = all & 0x7fffffffu, sign = all >> 24 & 0x80u;
  constexpr float STEPS = 16384.0f;  // whose last place is 2 ** -9, the step below 2 ** -6
  const unsigned small = __float_as_uint(__uint_as_float(bits) + STEPS) - __float_as_uint(STEPS);
  const unsigned large = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - (120u << 3);
  return static_cast<Fp8>(sign | (bits < 0x3c800000u ? small : large));
}

// The code that is nearest to x / 2 ** (exponent - 127).  exponent: the row's.
__device__ __forceinline__ Fp8 code_of(float x, int exponent) {
  return exponent == NAN_EXPONENT ? 0 : nearest_code(x * __int_as_float((254 - exponent) << 23));
}

// Two numbers of a row become what FP8 keeps of them; returns their codes.
__device__ __forceinline__ Vector<Fp8, 2> keep_pair(float (&x)[2], int exponent) {
  const Vector<Fp8, 2> codes = {code_of(x[0], exponent), code_of(x[1], exponent)};
  const unsigned two = widen_codes<__half>(codes.at[0] | codes.at[1] << 8);
  const Vector<__half, 2> both = reinterpret_cast<const Vector<__half, 2>&>(two);
  x[0] = widen(both.at[0]) * factor_of(exponent);
  x[1] = widen(both.at[1]) * factor_of(exponent);
  return codes;
}

// N neighbours of a cached row as one load brings them.
template <typename S, int N>
struct Piece {
  Vector<unsigned, N * static_cast<int>(sizeof(S)) / 4> words;

  __device__ __forceinline__ void load(const S* from) { load_words(from, words); }

  // Two of them as T, of 16 bits, in a register.
  template <typename T>
  __device__ __forceinline__ unsigned pair(int p) const {
    if constexpr (IS_FP8<S>) {
      return widen_codes<T>(p % 2 == 0 ? words.at[p / 2] & 0xffffu : words.at[p / 2] >> 16);
    } else {
      static_assert(sizeof(S) == 2, "two are a register");
      return words.at[p];
    }
  }

  // All of them, without the row's factor.
  __device__ __forceinline__ void widen_to(float (&to)[N]) const {
    if constexpr (IS_FP8<S>) {
#pragma unroll
      for (int p = 0; p < N / 2; ++p) {
        const unsigned two = pair<__half>(p);
        const Vector<__half, 2> both = reinterpret_cast<const Vector<__half, 2>&>(two);
        to[2 * p] = widen(both.at[0]);
        to[2 * p + 1] = widen(both.at[1]);
      }
    } else {
      const Vector<S, N> all = reinterpret_cast<const Vector<S, N>&>(words);
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = widen(all.at[i]);
    }
  }
};
