// Normalisation over the residual stream: each row is read once from memory.

#include "common.h"

namespace nightjar {
namespace {

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

}  // namespace
}  // namespace nightjar

using namespace nightjar;

// residual: float[rows, size], changed; delta: float[rows, size] added to it, or null; weight and
// bias: float[size]; out: float[rows, size].
extern "C" void layer_norm(float* residual, const float* delta, const float* weight,
                           const float* bias, int64_t rows, int64_t size, float epsilon,
                           float* out) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    float* row = residual + r * size;
    float* result = out + r * size;
    add(row, delta == nullptr ? nullptr : delta + r * size, size);
    const float mean = sum(row, size) / static_cast<float>(size);
    const float variance = squares(row, mean, size) / static_cast<float>(size);
    const float scale = 1.0f / std::sqrt(variance + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      result[i] = __builtin_fmaf((row[i] - mean) * scale, weight[i], bias[i]);
    }
  }
}

// As layer_norm, with the root of the mean square in the place of mean and variance.
extern "C" void rms_norm(float* residual, const float* delta, const float* weight, int64_t rows,
                         int64_t size, float epsilon, float* out) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    float* row = residual + r * size;
    float* result = out + r * size;
    add(row, delta == nullptr ? nullptr : delta + r * size, size);
    const float mean_square = squares(row, 0.0f, size) / static_cast<float>(size);
    const float scale = 1.0f / std::sqrt(mean_square + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) result[i] = row[i] * scale * weight[i];
  }
}
