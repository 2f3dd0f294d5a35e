// Vectors, and the functions of one number that the kernels share.
//
// Everything is written so that a number's bits never depend on the lane or the row it is computed
// in: products and sums are fused only where the code asks for it (-ffp-contract=off), and vectorised
// loops do the same operations in every lane.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace nightjar {

// IEEE binary16, as it is stored.
typedef _Float16 Half;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

// Floats of one register; arithmetic on it is lane by lane (a GCC and Clang extension).
typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

// As many whole numbers; what a comparison of vectors gives is one of these, too.
typedef int32_t Whole __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Vector load(const float* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

inline void store(float* to, Vector vector) { std::memcpy(to, &vector, sizeof(vector)); }

// The same from storage in half precision, which is exact, and into it, rounded to nearest even.
inline Vector load(const Half* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
  Vector vector;
  for (int lane = 0; lane < kLanes; ++lane) vector[lane] = static_cast<float>(from[lane]);
  return vector;
#endif
}

inline void store(Half* to, Vector vector) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(reinterpret_cast<__m512>(vector), 0));
#else
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<Half>(vector[lane]);
#endif
}

// bfloat16, as it is stored.
struct Bfloat {
  uint16_t bits;
};

#if defined(__AVX512BF16__)
// Rounded to nearest even; what is not a normal number becomes zero.
inline void store(Bfloat* to, Vector vector) {
  const __m256bh lanes = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(vector));
  std::memcpy(to, &lanes, sizeof(lanes));
}
#endif

inline Vector splat(float x) { return x - Vector{}; }

// a * b + c, rounded once.  As an instruction, because GCC may split a loop over the lanes.
inline Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_fmadd_ps(
      reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<Vector>(_mm256_fmadd_ps(
      reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  Vector sum;
  for (int lane = 0; lane < kLanes; ++lane) sum[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return sum;
#endif
}

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// The larger, or smaller, of the two; NaN stays NaN.
inline float at_least(float x, float least) { return x < least ? least : x; }
inline float at_most(float x, float most) { return x > most ? most : x; }

inline Vector at_least(Vector x, float least) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(
      _mm512_max_ps(_mm512_set1_ps(least), reinterpret_cast<__m512>(x)));
#else
  return x < least ? splat(least) : x;
#endif
}

// The larger lanes; where x is NaN those of y.
inline Vector larger(Vector x, Vector y) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(
      _mm512_max_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y)));
#else
  return x > y ? x : y;
#endif
}

inline Vector at_most(Vector x, float most) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(
      _mm512_min_ps(_mm512_set1_ps(most), reinterpret_cast<__m512>(x)));
#else
  return x > most ? splat(most) : x;
#endif
}

// x * 2^n, for whole n and results that are normal numbers.
inline float scaled_by_power(float x, float n) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits += static_cast<int32_t>(n) << 23;
  std::memcpy(&x, &bits, sizeof(bits));
  return x;
}

inline Vector scaled_by_power(Vector x, Vector n) {
  const Whole bits = reinterpret_cast<Whole>(x) + (__builtin_convertvector(n, Whole) << 23);
  return reinterpret_cast<Vector>(bits);
}

typedef int32_t Places __attribute__((vector_size(kLanes * sizeof(int32_t))));

// Two vectors that swap blocks of `width` lanes.  Lane l of the first result is l itself, or comes from
// the second vector where bit `width` of l is set.
struct Swap {
  alignas(64) int32_t first_places[kLanes];
  alignas(64) int32_t second_places[kLanes];

  constexpr explicit Swap(int width) : first_places(), second_places() {
    for (int lane = 0; lane < kLanes; ++lane) {
      first_places[lane] = lane & width ? lane - width + kLanes : lane;
      second_places[lane] = lane & width ? lane + kLanes : lane + width;
    }
  }
  Vector first(Vector a, Vector b) const { return __builtin_shuffle(a, b, loaded(first_places)); }
  Vector second(Vector a, Vector b) const { return __builtin_shuffle(a, b, loaded(second_places)); }

 private:
  static Places loaded(const int32_t* from) {
    Places places;
    std::memcpy(&places, from, sizeof(places));
    return places;
  }
};

inline constexpr Swap kSwaps[] = {Swap(1), Swap(2), Swap(4), Swap(8)};

inline int bits_of(int width) { return __builtin_ctz(static_cast<unsigned>(width)); }

// The lanes of each vector become the vectors of each lane, by swapping ever smaller blocks.
inline void transpose(Vector (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int width = kLanes / 2; width > 0; width /= 2) {
    const Swap& swap = kSwaps[bits_of(width)];
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r) {
      if (r & width) continue;
      const Vector low = swap.first(rows[r], rows[r + width]);
      rows[r + width] = swap.second(rows[r], rows[r + width]);
      rows[r] = low;
    }
  }
}

// Lane l of the result is the sum of rows[l]'s lanes: a transposition whose halves are added at once.
inline Vector lane_sums(Vector (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int width = kLanes / 2; width > 0; width /= 2) {
    const Swap& swap = kSwaps[bits_of(width)];
#pragma GCC unroll 8
    for (int r = 0; r < width; ++r) {
      rows[r] = swap.first(rows[r], rows[r + width]) + swap.second(rows[r], rows[r + width]);
    }
  }
  return rows[0];
}

template <typename V>
inline V constant(float x) {
  if constexpr (sizeof(V) == sizeof(float)) return x;
  else return splat(x);
}

// e^x to about one unit in the last place, 2^n * p(f) with the polynomial of Cephes' expf.
// Below -87 it stays at e^-87 (1.6e-38), above 88 at e^88; NaN stays NaN.  V: float or Vector.
template <typename V>
[[gnu::always_inline]] inline V exponential(V x) {
  // Adding and taking off 1.5 * 2^23 rounds to a whole number.
  constexpr float rounder = 12582912.0f;
  x = at_least(x, -87.0f);
  x = at_most(x, 88.0f);
  const V n = (x * 1.44269504088896341f + rounder) - rounder;
  V f = fused(n, constant<V>(-0.693359375f), x);
  f = fused(n, constant<V>(2.12194440e-4f), f);
  V p = fused(constant<V>(1.9875691500e-4f), f, constant<V>(1.3981999507e-3f));
  p = fused(p, f, constant<V>(8.3334519073e-3f));
  p = fused(p, f, constant<V>(4.1665795894e-2f));
  p = fused(p, f, constant<V>(1.6666665459e-1f));
  p = fused(p, f, constant<V>(5.0000001201e-1f));
  p = fused(p, f * f, f + 1.0f);
  return scaled_by_power(p, n);
}

// 2^x to a relative error of 2e-7, by a polynomial fitted to -1/2..1/2.  Far below zero it is 0, or
// without AVX-512 2^-126; x up to 126.  NaN stays NaN.
inline Vector power_of_two(Vector x) {
  constexpr float fit[] = {9.675541354e-3f, 5.550713304e-2f, 2.402211972e-1f, 6.931469670e-1f,
                           1.000000072f};
#if defined(__AVX512F__)
  // From minus infinity no whole part can be taken off.
  x = at_least(x, -200.0f);
  const __m512 n = _mm512_roundscale_ps(reinterpret_cast<__m512>(x), 0);
  const Vector f = x - reinterpret_cast<Vector>(n);
#else
  constexpr float rounder = 12582912.0f;  // adding and taking off 1.5 * 2^23 rounds
  x = at_least(x, -126.0f);
  const Vector n = (x + rounder) - rounder;
  const Vector f = x - n;
#endif
  Vector p = splat(1.327646237e-3f);
  for (float term : fit) p = fused(p, f, splat(term));
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), n));
#else
  return scaled_by_power(p, n);
#endif
}

constexpr int kLine = 64;  // bytes that a cache fetches at once

// Prefetches `n` numbers that are read or written soon.  The address need not be valid.
template <typename S>
inline void fetch(const S* from, int64_t n) {
  for (int64_t i = 0; i < n; i += kLine / sizeof(S)) __builtin_prefetch(from + i);
}
template <typename S>
inline void fetch_to_write(S* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kLine / sizeof(S)) __builtin_prefetch(to + i, 1);
}

constexpr float kLog2E = 1.44269504088896341f;

// The sum, and the largest, of a vector's lanes, in an order that is always the same.
template <typename Join>
inline float joined(Vector x, Join join) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof(lanes));
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = join(lanes[i], lanes[i + width]);
  }
  return lanes[0];
}

inline float sum_of(Vector x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
  return joined(x, [](float a, float b) { return a + b; });
#endif
}

inline float largest_of(Vector x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x));
#else
  return joined(x, [](float a, float b) { return a > b ? a : b; });
#endif
}

}  // namespace nightjar
