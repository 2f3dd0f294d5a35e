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

inline float sum(const float* row, int64_t size) {
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < size; ++i) total += row[i];
  return total;
}

// The sum of (x - center)^2.
inline float squares(const float* row, float center, int64_t size) {
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < size; ++i) {
    const float off = row[i] - center;
    total = __builtin_fmaf(off, off, total);
  }
  return total;
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

  Stream(const Norm& norm, float* residual, const float* delta, int64_t first)
      : norm(norm),
        residual(residual + first * norm.size),
        delta(delta == nullptr ? nullptr : delta + first * norm.size) {}

  void normalized(int64_t row, float* out) const {
    const int64_t place = row * norm.size;
    fetch(residual + place + norm.size, norm.size);
    if (delta != nullptr) fetch(delta + place + norm.size, norm.size);
    normalize(norm, residual + place, delta == nullptr ? nullptr : delta + place, out);
  }
};

}  // namespace nightjar
