// The work on a projection's heads before attention: norms, rotation, keys and values into the
// paged cache.  All of it is done to a row while the row is in the processor's cache.
#pragma once

#include <vector>

#include "attention.h"
#include "norm.h"
#include "team.h"

namespace nightjar {

// Packed heads, as Python hands them over: see attention.py.
//
// qkv: [rows, heads + 2 kv_heads, head_size] in the cache's numbers.  query_norm, key_norm: of
// head_size, both without a weight for no norms.  Row r rotates `pairs` channels of each query and key
// by the angles of positions[r]: cosines and sines [positions, pairs], channel i with channel i + pairs
// (arXiv 2104.09864); null for no rotation.  Keys and values of the first `written` rows go to offset
// offsets[r] of block blocks[r].
struct Projection {
  void* qkv;
  int64_t rows;
  int64_t heads;
  Norm query_norm;
  Norm key_norm;
  const float* cosines;
  const float* sines;
  const int64_t* positions;
  int64_t pairs;
  const int64_t* blocks;
  const int64_t* offsets;
  int64_t written;
};

inline void turn(float* head, const float* cosines, const float* sines, int64_t pairs) {
  float* other = head + pairs;
#pragma omp simd
  for (int64_t i = 0; i < pairs; ++i) {
    const float first = head[i], second = other[i];
    head[i] = first * cosines[i] - second * sines[i];
    other[i] = second * cosines[i] + first * sines[i];
  }
}

// A head in FP32 while it is changed: where it lies, or widened and put back at the end.
class Changed {
 public:
  Changed(float* head, int64_t, float*) : numbers(head) {}
  Changed(Half* head, int64_t size, float* room) : numbers(room), head_(head), size_(size) {
    widened(head, size, room);
  }
  ~Changed() {
    for (int64_t d = 0; d < size_; d += kLanes) store(head_ + d, load(numbers + d));
  }

  float* const numbers;

 private:
  Half* head_ = nullptr;
  int64_t size_ = 0;
};

constexpr int64_t kRowsAhead = 2;  // how many rows ahead keys and values are prefetched

// Called by all members of a region.
template <typename S>
void prepare(Member& member, const Projection& rows, const Cache<S>& cache) {
  const int64_t size = cache.head_size, heads = rows.heads, kv_heads = cache.kv_heads;
  const int64_t step = (heads + 2 * kv_heads) * size;
  const bool norms = rows.query_norm.weight != nullptr;
  const bool changes = norms || rows.cosines != nullptr;
  std::vector<float> room(size);
  member.share(rows.rows, [&](int64_t r) {
    S* row = static_cast<S*>(rows.qkv) + r * step;
    for (int64_t h = 0; changes && h < heads + kv_heads; ++h) {
      const Changed changed(row + h * size, size, room.data());
      float* head = changed.numbers;
      if (norms) normalize(h < heads ? rows.query_norm : rows.key_norm, head, nullptr, head);
      if (rows.cosines != nullptr) {
        const int64_t angles = rows.positions[r] * rows.pairs;
        turn(head, rows.cosines + angles, rows.sines + angles, rows.pairs);
      }
    }
    if (r >= rows.written) return;
    fetch(row + kRowsAhead * step + heads * size, 2 * kv_heads * size);
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t to = cache.at(rows.blocks[r], h) + rows.offsets[r] * size;
      const S* key_head = row + (heads + h) * size;
      std::copy_n(key_head, size, cache.keys + to);
      std::copy_n(key_head + kv_heads * size, size, cache.values + to);
    }
  });
}

}  // namespace nightjar
