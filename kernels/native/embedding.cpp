// The residual stream at its beginning: bound by reading the tables.

#include <atomic>

#include "common.h"
#include "team.h"

using namespace nightjar;

// out[i] = table[ids[i]] * scale + position_table[positions[i]]: float[n, width]; position_table: null
// for nothing to add.  Returns the first i whose id or position is not below `ids_end` or
// `positions_end`, or n; what comes after it may be left out.
extern "C" int64_t embed(const float* table, const int64_t* ids, int64_t ids_end, float scale,
                         const float* position_table, const int64_t* positions,
                         int64_t positions_end, int64_t n, int64_t width, float* out) {
  std::atomic<int64_t> bad{n};
  const auto read_row = [&](int64_t i) {
    const bool has_position = position_table != nullptr;
    const uint64_t id = ids[i], position = has_position ? positions[i] : 0;
    if (id >= static_cast<uint64_t>(ids_end) ||
        (has_position && position >= static_cast<uint64_t>(positions_end))) {
      int64_t first = bad.load();
      while (i < first && !bad.compare_exchange_weak(first, i)) {
      }
      return;
    }
    const float* from = table + id * width;
    const float* place = has_position ? position_table + position * width : nullptr;
    float* to = out + i * width;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) to[k] = from[k] * scale;
    if (place == nullptr) return;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) to[k] += place[k];
  };
  parallel([&](Member& member) { member.share(n, read_row); });
  return bad;
}
