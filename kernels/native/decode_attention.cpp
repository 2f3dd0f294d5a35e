// Attention of one row per sequence to its cached keys: bound by reading them.

#include <vector>

#include "attention.h"

namespace nightjar {
namespace {

// A running softmax over the keys of one query head.
struct Head {
  float peak;
  float sum;
};

// Scores of n keys: lanes of products, added up at the end.
template <typename S>
inline void score(const float* q, const S* keys, int64_t head_size, int64_t n, float* scores) {
  for (int64_t j = 0; j < n; ++j) {
    Vector lanes{};
    for (int64_t d = 0; d < head_size; d += kLanes) {
      lanes = fused(load(q + d), load(keys + j * head_size + d), lanes);
    }
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
    scores[j] = sum;
  }
}

// Take n keys into a head's running softmax; scores become weights.
inline void weigh(Head& head, float* scores, int64_t n, float* out, int64_t head_size) {
  float peak = head.peak;
  for (int64_t j = 0; j < n; ++j) peak = !(scores[j] <= peak) ? scores[j] : peak;
  const float correction = exponential(head.peak - peak);
  // Past n the score is -inf and its weight left out: whole registers only.
  for (int64_t j = n; j < kPieceKeys; ++j) scores[j] = -std::numeric_limits<float>::infinity();
#pragma omp simd
  for (int64_t j = 0; j < kPieceKeys; ++j) scores[j] = exponential(scores[j] - peak);
  float sum = head.sum * correction;
  for (int64_t j = 0; j < n; ++j) sum += scores[j];
  head.sum = sum;
  head.peak = peak;
#pragma omp simd
  for (int64_t d = 0; d < head_size; ++d) out[d] *= correction;
}

// out += weights x values, R registers of channels at a time.
template <int R, typename S>
inline void add_channels(const float* weights, const S* values, int64_t head_size, int64_t n,
                         float* out) {
  Vector sums[R];
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) sums[i] = load(out + i * kLanes);
  for (int64_t j = 0; j < n; ++j) {
    const Vector weight = splat(weights[j]);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      sums[i] = fused(weight, load(values + j * head_size + i * kLanes), sums[i]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) store(out + i * kLanes, sums[i]);
}

template <typename S>
inline void add_values(const float* weights, const S* values, int64_t head_size, int64_t n,
                       float* out) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= head_size; d += 4 * kLanes) {
    add_channels<4>(weights, values + d, head_size, n, out + d);
  }
  for (; d < head_size; d += kLanes) {
    add_channels<1>(weights, values + d, head_size, n, out + d);
  }
}

// The rows of one KV head of one sequence, and their running softmax.
template <typename S>
class Group {
 public:
  Group(const Cache<S>& cache, int64_t heads)
      : cache_(cache), heads_(heads), queries_(heads * cache.head_size), states_(heads) {}

  // out: float[heads, head_size], as the queries.
  void run(const float* q, float scale, const int64_t* table, int64_t kv_head, int64_t length,
           float* out) {
    const int64_t size = cache_.head_size, block_size = cache_.block_size;
    for (int64_t d = 0; d < heads_ * size; ++d) queries_[d] = q[d] * scale;
    std::fill(out, out + heads_ * size, 0.0f);
    std::fill(states_.begin(), states_.end(), Head{-std::numeric_limits<float>::infinity(), 0.0f});
    for (int64_t start = 0; start < length; start += block_size) {
      const int64_t base = cache_.at(table[start / block_size], kv_head);
      const int64_t in_block = std::min(block_size, length - start);
      for (int64_t first = 0; first < in_block; first += kPieceKeys) {
        const int64_t n = std::min<int64_t>(kPieceKeys, in_block - first);
        attend(base + first * size, n, out);
      }
    }
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t d = 0; d < size; ++d) out[h * size + d] /= states_[h].sum;
    }
  }

 private:
  void attend(int64_t place, int64_t n, float* out) {
    const int64_t size = cache_.head_size;
    alignas(64) float scores[kPieceKeys];
    for (int64_t h = 0; h < heads_; ++h) {
      score(queries_.data() + h * size, cache_.keys + place, size, n, scores);
      weigh(states_[h], scores, n, out + h * size, size);
      add_values(scores, cache_.values + place, size, n, out + h * size);
    }
  }

  const Cache<S>& cache_;
  int64_t heads_;
  std::vector<float> queries_;
  std::vector<Head> states_;
};

template <typename S>
void decode(const float* q, int64_t q_step, int64_t batch, int64_t heads, const Cache<S>& cache,
            const int64_t* tables, const int64_t* table_starts, const int64_t* lengths,
            float scale, float* out) {
  const int64_t in_group = heads / cache.kv_heads;
#pragma omp parallel
  {
    Group<S> group(cache, in_group);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < batch; ++i) {
      for (int64_t kv_head = 0; kv_head < cache.kv_heads; ++kv_head) {
        const int64_t first = kv_head * in_group * cache.head_size;
        group.run(q + i * q_step + first, scale, tables + table_starts[i], kv_head, lengths[i],
                  out + i * heads * cache.head_size + first);
      }
    }
  }
}

}  // namespace
}  // namespace nightjar

using namespace nightjar;

// q: float[batch, heads, head_size], rows q_step floats apart; row i attends to the first lengths[i]
// positions of the block table that begins at tables[table_starts[i]].  keys, values: float, or
// binary16 if `half`.  out: float[batch, heads, head_size], contiguous.
extern "C" void decode_attention(const float* q, int64_t q_step, int64_t batch, int64_t heads,
                                 const void* keys, const void* values, int64_t half,
                                 int64_t kv_heads, int64_t block_size, int64_t head_size,
                                 const int64_t* tables, const int64_t* table_starts,
                                 const int64_t* lengths, float scale, float* out) {
  with_cache(keys, values, half, kv_heads, block_size, head_size, [&](const auto& cache) {
    decode(q, q_step, batch, heads, cache, tables, table_starts, lengths, scale, out);
  });
}
