// Normalisation of one row of the residual stream.
#pragma once

#include "common.h"

namespace nightjar {

// weight: float[size]; bias: float[size] for a layer norm, null for a root-mean-square norm.
// Python hands it over in this layout: see norm.py.
struct Norm {
  const float* weight;
  const float* bias;
  int64_t size;
  float epsilon;
};

// row += delta, where there is one.
inline void add(float* row, const float* delta, int64_t size) {
  if (delta == nullptr) return;
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) row[i] += delta[i];
}

// The sum of add(so far, x) over a row, in an order that is always the same: registers that do not
// wait for each other, and what is left number by number.
template <typename Add>
inline float summed(const float* row, int64_t size, Add add) {
  constexpr int kChains = 4;  // an addition's latency is four of them
  Vector parts[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) parts[c] = add(parts[c], load(row + i + c * kLanes));
  }
  for (; i + kLanes <= size; i += kLanes) parts[0] = add(parts[0], load(row + i));
  float total = sum_of((parts[0] + parts[1]) + (parts[2] + parts[3]));
  for (; i < size; ++i) total = add(total, row[i]);
  return total;
}

inline float sum(const float* row, int64_t size) {
  return summed(row, size, [](auto total, auto x) { return total + x; });
}

// The sum of (x - center)^2.
inline float squares(const float* row, float center, int64_t size) {
  return summed(row, size, [&](auto total, auto x) {
    const auto off = x - center;
    return fused(off, off, total);
  });
}

// Adds delta, or nothing if null, to the row in place, and writes the normalised row to out.
inline void normalize(const Norm& norm, float* row, const float* delta, float* out) {
  const int64_t size = norm.size;
  const float *weight = norm.weight, *bias = norm.bias;
  add(row, delta, size);
  if (bias != nullptr) {
    const float mean = sum(row, size) / static_cast<float>(size);
    const float variance = squares(row, mean, size) / static_cast<float>(size);
    const float scale = 1.0f / std::sqrt(variance + norm.epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      out[i] = __builtin_fmaf((row[i] - mean) * scale, weight[i], bias[i]);
    }
  } else {
    const float mean_square = squares(row, 0.0f, size) / static_cast<float>(size);
    const float scale = 1.0f / std::sqrt(mean_square + norm.epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[i] = row[i] * scale * weight[i];
  }
}

// The residual stream from a row on: float[rows, norm.size], to which delta is added in place.
struct Stream {
  const Norm& norm;
  float* residual;
  const float* delta;  // null for nothing

  Stream(const Norm& norm, float* residual, const float* delta)
      : norm(norm), residual(residual), delta(delta) {}

  Stream from(int64_t row) const {
    const int64_t place = row * norm.size;
    return {norm, residual + place, delta == nullptr ? nullptr : delta + place};
  }

  void normalized(int64_t row, float* out) const {
    const int64_t place = row * norm.size;
    fetch(residual + place + norm.size, norm.size);
    if (delta != nullptr) fetch(delta + place + norm.size, norm.size);
    normalize(norm, residual + place, delta == nullptr ? nullptr : delta + place, out);
  }
};

}  // namespace nightjar
