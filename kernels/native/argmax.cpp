// The best of every row of scores, and whether they are all numbers, in one pass: bound by reading.

#include "common.h"
#include "team.h"

namespace nightjar {
namespace {

constexpr int64_t kBlock = 32 * kLanes;  // scores among which the best is searched a second time

// A row's scores as they are read.  A NaN is no candidate.
struct Best {
  float score = -std::numeric_limits<float>::infinity();
  int64_t place = 0;  // where its block begins
  float spoilt = 0.0f;  // NaN from the first score on that is NaN or infinite

  // n scores, not above kBlock, from `from` on.
  void take(const float* scores, int64_t from, int64_t n) {
    Vector best = splat(score), zeros{};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const Vector block = load(scores + i);
      best = larger(block, best);
      zeros = fused(block, Vector{}, zeros);
    }
    float most = largest_of(best), sum = sum_of(zeros);
    for (; i < n; ++i) {
      if (scores[i] > most) most = scores[i];
      sum += scores[i] * 0.0f;
    }
    if (most > score) score = most, place = from;
    spoilt += sum;
  }
};

}  // namespace
}  // namespace nightjar

using namespace nightjar;

// scores: float[rows, width], contiguous; tokens: the place of each row's best score, the first of
// equals; finite: one byte a row, 1 if none of it is NaN or infinite.
extern "C" void argmax(const float* scores, int64_t rows, int64_t width, int64_t* tokens,
                       uint8_t* finite) {
  parallel([&](Member& member) {
    member.take(rows, [&](int64_t i) {
      const float* row = scores + i * width;
      Best best;
      for (int64_t from = 0; from < width; from += kBlock) {
        best.take(row + from, from, std::min(kBlock, width - from));
      }
      int64_t place = best.place;
      while (place + 1 < width && row[place] != best.score) ++place;
      tokens[i] = place;
      finite[i] = best.spoilt == 0.0f;
    });
  });
}
