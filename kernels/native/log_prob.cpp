// Negative log-likelihoods out of rows of scores, in two passes over a row and no writes.

#include "common.h"
#include "team.h"

using namespace nightjar;

// logits: float[rows, vocabulary]; sources: int64[pairs], ascending, and targets: int64[pairs];
// nll[i] = log sum exp(logits[sources[i]]) - logits[sources[i], targets[i]], NaN where the row holds
// NaN or infinities.
// starts: int64[runs + 1], where the pairs of one source begin.
extern "C" void target_nll(const float* logits, int64_t vocabulary, const int64_t* sources,
                           const int64_t* targets, const int64_t* starts, int64_t runs,
                           float* nll) {
  const auto score_run = [=](int64_t run) {
    const float* row = logits + sources[starts[run]] * vocabulary;
    float peak = -std::numeric_limits<float>::infinity(), lowest = -peak;
#pragma omp simd reduction(max : peak) reduction(min : lowest)
    for (int64_t i = 0; i < vocabulary; ++i) {
      peak = row[i] > peak ? row[i] : peak;
      lowest = row[i] < lowest ? row[i] : lowest;
    }
    // In parts, so that many small numbers are not lost beside a large sum.
    double total = 0.0;
    for (int64_t first = 0; first < vocabulary; first += 1024) {
      const int64_t end = std::min<int64_t>(vocabulary, first + 1024);
      float part = 0.0f;
#pragma omp simd reduction(+ : part)
      for (int64_t i = first; i < end; ++i) part += exponential(row[i] - peak);
      total += part;
    }
    // A NaN among the scores is in the sum, an infinite peak makes it NaN, and -inf is told here.
    const double log_sum = peak + std::log(total) + (lowest - lowest);
    for (int64_t i = starts[run]; i < starts[run + 1]; ++i) {
      nll[i] = static_cast<float>(log_sum - row[targets[i]]);
    }
  };
  parallel([&](Member& member) { member.take(runs, score_run); });
}
