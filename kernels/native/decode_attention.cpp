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

// Scores of n keys, each a dot product in two registers, added up lane by lane at the end.
inline void score(const float* q, const float* keys, int64_t head_size, int64_t n, float* scores) {
  for (int64_t j = 0; j < n; ++j) {
    const float* key = keys + j * head_size;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < head_size; ++d) sum = __builtin_fmaf(q[d], key[d], sum);
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

// out += weights x values, four keys at a time.
inline void add_values(const float* weights, const float* values, int64_t head_size, int64_t n,
                       float* out) {
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) {
    const float* row = values + j * head_size;
#pragma omp simd
    for (int64_t d = 0; d < head_size; ++d) {
      float sum = __builtin_fmaf(weights[j], row[d], out[d]);
      sum = __builtin_fmaf(weights[j + 1], row[head_size + d], sum);
      sum = __builtin_fmaf(weights[j + 2], row[2 * head_size + d], sum);
      out[d] = __builtin_fmaf(weights[j + 3], row[3 * head_size + d], sum);
    }
  }
  for (; j < n; ++j) {
#pragma omp simd
    for (int64_t d = 0; d < head_size; ++d) {
      out[d] = __builtin_fmaf(weights[j], values[j * head_size + d], out[d]);
    }
  }
}

}  // namespace
}  // namespace nightjar

using namespace nightjar;

// q: float[batch, heads, head_size], rows q_step floats apart; row i attends to the first lengths[i]
// positions of the block table that begins at tables[table_starts[i]].
// out: float[batch, heads, head_size], contiguous.
extern "C" void decode_attention(const float* q, int64_t q_step, int64_t batch, int64_t heads,
                                 const float* keys, const float* values, int64_t kv_heads,
                                 int64_t block_size, int64_t head_size, const int64_t* tables,
                                 const int64_t* table_starts, const int64_t* lengths, float scale,
                                 float* out) {
  const Cache cache{keys, values, kv_heads, block_size, head_size};
  const int64_t group = heads / kv_heads;
#pragma omp parallel
  {
    std::vector<float> queries(group * head_size);
    std::vector<Head> states(group);
    alignas(64) float scores[kPieceKeys];
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < batch; ++i) {
      for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
        const float* query = q + i * q_step + kv_head * group * head_size;
        float* result = out + (i * heads + kv_head * group) * head_size;
        for (int64_t d = 0; d < group * head_size; ++d) queries[d] = query[d] * scale;
        std::fill(result, result + group * head_size, 0.0f);
        std::fill(states.begin(), states.end(),
                  Head{-std::numeric_limits<float>::infinity(), 0.0f});
        for (int64_t start = 0; start < lengths[i]; start += block_size) {
          const int64_t block = tables[table_starts[i] + start / block_size];
          const int64_t in_block = std::min(block_size, lengths[i] - start);
          for (int64_t first = 0; first < in_block; first += kPieceKeys) {
            const int64_t n = std::min<int64_t>(kPieceKeys, in_block - first);
            const int64_t place = cache.at(block, kv_head) + first * head_size;
            for (int64_t g = 0; g < group; ++g) {
              score(queries.data() + g * head_size, keys + place, head_size, n, scores);
              weigh(states[g], scores, n, result + g * head_size, head_size);
              add_values(scores, values + place, head_size, n, result + g * head_size);
            }
          }
        }
        for (int64_t g = 0; g < group; ++g) {
          for (int64_t d = 0; d < head_size; ++d) result[g * head_size + d] /= states[g].sum;
        }
      }
    }
  }
}
