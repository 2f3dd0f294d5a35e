// Which rows of scores hold nothing but numbers, in one pass.

#include "common.h"
#include "team.h"

using namespace nightjar;

// scores: float[rows, width], contiguous; finite: one byte a row, 1 if none of it is NaN or infinite.
extern "C" void finite_rows(const float* scores, int64_t rows, int64_t width, uint8_t* finite) {
  const auto look_at = [=](int64_t row) {
    constexpr uint32_t kExponent = 0x7f800000;  // all of its bits are set in those two alone
    uint32_t found = 0;
#pragma omp simd reduction(| : found)
    for (int64_t i = 0; i < width; ++i) {
      uint32_t bits;
      std::memcpy(&bits, scores + row * width + i, sizeof(bits));
      found |= (bits & kExponent) == kExponent;
    }
    finite[row] = found == 0;
  };
  parallel([&](Member& member) { member.take(rows, look_at); });
}
