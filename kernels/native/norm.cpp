// Normalisation over the residual stream: each row is read once from memory.

#include "norm.h"

using namespace nightjar;

// residual: float[rows, size], changed; delta: float[rows, size] added to it, or null; out:
// float[rows, size].
extern "C" void norm(const Norm* norm, float* residual, const float* delta, int64_t rows,
                     float* out) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t place = r * norm->size;
    normalize(*norm, residual + place, delta == nullptr ? nullptr : delta + place, out + place);
  }
}
