// Normalisation over the residual stream: each row is read once from memory.

#include "norm.h"

#include "team.h"

using namespace nightjar;

// residual: float[rows, size], changed; delta: float[rows, size] added to it, or null; out:
// float[rows, size].
extern "C" void norm(const Norm* norm, float* residual, const float* delta, int64_t rows,
                     float* out) {
  const auto normalize_row = [=](int64_t row) {
    const int64_t place = row * norm->size;
    normalize(*norm, residual + place, delta == nullptr ? nullptr : delta + place, out + place);
  };
  parallel([&](Member& member) { member.share(rows, normalize_row); });
}
