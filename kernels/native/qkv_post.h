// What is done to a projection's heads before attention: norms, rotation, keys and values into the
// paged cache; all of a row while it is at hand.
#pragma once

#include "attention.h"
#include "norm.h"
#include "team.h"

namespace nightjar {

// Packed heads, as Python hands them over: see attention.py.
//
// qkv: float[rows, heads + 2 kv_heads, head_size].  query_norm, key_norm: float[head_size], or null
// for no norms.  Row r turns `pairs` channels of each query and key by the angles of positions[r]:
// cosines and sines [positions, pairs], channel i with channel i + pairs (arXiv 2104.09864); null for
// no rotation.  Keys and values of the first `written` rows go to offset offsets[r] of block
// blocks[r].
struct Projection {
  float* qkv;
  int64_t rows;
  int64_t heads;
  const float* query_norm;
  const float* key_norm;
  float epsilon;
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

template <typename S>
void write_head(S* to, const float* from, int64_t head_size) {
  for (int64_t d = 0; d < head_size; d += kLanes) store(to + d, load(from + d));
}

// Called by all members of a region.
template <typename S>
void prepare(Member& member, const Projection& rows, const Cache<S>& cache) {
  const int64_t size = cache.head_size, heads = rows.heads, kv_heads = cache.kv_heads;
  const int64_t step = (heads + 2 * kv_heads) * size;
  const Norm query{rows.query_norm, nullptr, size, rows.epsilon};
  const Norm key{rows.key_norm, nullptr, size, rows.epsilon};
  member.share(rows.rows, [&](int64_t r) {
    float* row = rows.qkv + r * step;
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      float* head = row + h * size;
      if (query.weight != nullptr) normalize(h < heads ? query : key, head, nullptr, head);
      if (rows.cosines != nullptr) {
        const int64_t angles = rows.positions[r] * rows.pairs;
        turn(head, rows.cosines + angles, rows.sines + angles, rows.pairs);
      }
    }
    if (r >= rows.written) return;
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t to = cache.at(rows.blocks[r], h) + rows.offsets[r] * size;
      const float* key_head = row + (heads + h) * size;
      write_head(cache.keys + to, key_head, size);
      write_head(cache.values + to, key_head + kv_heads * size, size);
    }
  });
}

}  // namespace nightjar
