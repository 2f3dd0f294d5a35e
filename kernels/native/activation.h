// The activations of a feed-forward block, a register at a time.
#pragma once

#include "common.h"

namespace nightjar {

enum Activation { kNone = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kSilu = 4 };

// 1 / x to about one unit in the last place: with AVX-512 an estimate of 14 bits and a step of
// Newton's, at a fraction of a division's cost.
inline Vector reciprocal(Vector x) {
#if defined(__AVX512F__)
  const Vector estimate = reinterpret_cast<Vector>(_mm512_rcp14_ps(reinterpret_cast<__m512>(x)));
  return estimate * (splat(2.0f) - x * estimate);
#else
  return splat(1.0f) / x;
#endif
}

// 1 / (1 + 2^t); from 2^126 on the sum's reciprocal would not be a normal number.
inline Vector logistic(Vector t) {
  return reciprocal(power_of_two(at_most(t, 126.0f)) + splat(1.0f));
}

// The same with a relative error of 1.4e-4, a third of what half precision loses when it keeps the
// result.  Any number t; infinity gives NaN.
inline Vector rough_logistic(Vector t) {
#if defined(__AVX512F__)
  constexpr float fit[] = {2.426111221e-1f, 6.932609858e-1f, 9.999280736e-1f};  // 2^x to 7.5e-5
  const __m512 n = _mm512_roundscale_ps(reinterpret_cast<__m512>(t), 0);
  const Vector f = t - reinterpret_cast<Vector>(n);
  Vector p = splat(5.517166722e-2f);
  for (float term : fit) p = fused(p, f, splat(term));
  const __m512 power = _mm512_scalef_ps(reinterpret_cast<__m512>(p), n);
  return reinterpret_cast<Vector>(_mm512_rcp14_ps(_mm512_add_ps(power, _mm512_set1_ps(1.0f))));
#else
  return logistic(t);
#endif
}

template <bool kRough>
inline Vector logistic_to(Vector t) {
  if constexpr (kRough) return rough_logistic(t);
  return logistic(t);
}

template <bool kRough>
inline Vector silu(Vector x) {
  return x * logistic_to<kRough>(x * splat(-kLog2E));
}

// Hendrycks and Gimpel, arXiv 1606.08415: x * sigmoid(2 u) is 0.5 * x * (1 + tanh(u)).
template <bool kRough>
inline Vector gelu_tanh(Vector x) {
  constexpr float slope = -kLog2E * 1.5957691216057308f;  // 2 * sqrt(2 / pi)
  return x * logistic_to<kRough>(x * fused(x * x, splat(slope * 0.044715f), splat(slope)));
}

// 0.5 * x * erfc(-x / sqrt(2)); erfc by the Chebyshev fit of Numerical Recipes (erfcc, relative
// error below 1.2e-7).
inline Vector gelu(Vector x) {
  constexpr float fit[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                           0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  const Vector z = (x < 0.0f ? -x : x) * splat(0.70710678118654752f);
  const Vector t = reciprocal(fused(splat(0.5f), z, splat(1.0f)));
  Vector p = splat(0.17087277f);
  for (float term : fit) p = fused(t, p, splat(term));
  const Vector tail = splat(0.5f) * x * t * exponential(fused(-z, z, p));
  return x < 0.0f ? tail : x - tail;
}

// kRough: as far as half precision can tell; see rough_logistic.
template <int A, bool kRough = false>
inline Vector activated(Vector x) {
  if constexpr (A == kGeluTanh) return gelu_tanh<kRough>(x);
  if constexpr (A == kGelu) return gelu(x);
  if constexpr (A == kRelu) return x < 0.0f ? Vector{} : x;
  if constexpr (A == kSilu) return silu<kRough>(x);
  return x;
}

}  // namespace nightjar
