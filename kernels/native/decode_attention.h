// Attention of one row per sequence to its cached keys: bound by reading them.
#pragma once

#include <vector>

#include "attention.h"
#include "team.h"

namespace nightjar {

// A running softmax over the keys of one query head.
struct Head {
  float peak;
  float sum;
};

// Products of kLanes keys, or of `n` and zeros for the others, with a query of W registers, added up
// over the registers.  The same row of the next piece lies `ahead` numbers on; in memory that is the
// next head.  It is prefetched meanwhile.
template <int W, typename S>
inline void multiply_keys(const float* q, const S* keys, int64_t head_size, int64_t n, int64_t ahead,
                          Vector (&products)[kLanes]) {
  Vector parts[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; ++i) parts[i] = load(q + i * kLanes);
#pragma GCC unroll 4
  for (int64_t j = 0; j < kLanes; ++j) {
    const S* key = keys + j * head_size;
    Vector product{};
    if (j < n) {
      fetch(key + ahead, head_size);
#pragma GCC unroll 8
      for (int i = 0; i < W; ++i) product = fused(parts[i], load(key + i * kLanes), product);
    }
    products[j] = product;
  }
}

// The same for a head of any number of registers.
template <typename S>
inline void multiply_any(const float* q, const S* keys, int64_t head_size, int64_t n, int64_t ahead,
                         Vector (&products)[kLanes]) {
  for (int64_t j = 0; j < kLanes; ++j) {
    const S* key = keys + j * head_size;
    Vector product{};
    if (j < n) {
      fetch(key + ahead, head_size);
      for (int64_t d = 0; d < head_size; d += kLanes) {
        product = fused(load(q + d), load(key + d), product);
      }
    }
    products[j] = product;
  }
}

// Scores of n keys, and zeros up to whole registers: lanes of products, of as many keys as there are
// lanes, added up together.
template <typename S>
inline void score(const float* q, const S* keys, int64_t head_size, int64_t n, int64_t ahead,
                  float* scores) {
  for (int64_t first = 0; first < n; first += kLanes) {
    Vector products[kLanes];
    const S* block = keys + first * head_size;
    switch (head_size / kLanes) {
      case 4: multiply_keys<4>(q, block, head_size, n - first, ahead, products); break;
      case 8: multiply_keys<8>(q, block, head_size, n - first, ahead, products); break;
      default: multiply_any(q, block, head_size, n - first, ahead, products);
    }
    store(scores + first, lane_sums(products));
  }
}

// Take n keys into a head's running softmax; scores become weights.  A NaN among them is in the sum.
inline void weigh(Head& head, float* scores, int64_t n, float* out, int64_t head_size) {
  // Past n the score is -inf and the weight nothing: whole registers only.
  for (int64_t j = n; j < kPieceKeys; ++j) scores[j] = -std::numeric_limits<float>::infinity();
  Vector peaks = splat(head.peak);
  for (int64_t j = 0; j < kPieceKeys; j += kLanes) {
    peaks = larger(load(scores + j), peaks);
  }
  const float peak = largest_of(peaks);
  const Vector correction = power_of_two(splat(head.peak) - splat(peak));
  Vector sums{};
  for (int64_t j = 0; j < kPieceKeys; j += kLanes) {
    const Vector score = load(scores + j);
    const Vector weight = power_of_two(score - splat(peak));
    const Vector shown = score <= -std::numeric_limits<float>::infinity() ? Vector{} : weight;
    store(scores + j, shown);
    sums += shown;
  }
  head.sum = fused(head.sum, correction[0], sum_of(sums));
  head.peak = peak;
  for (int64_t d = 0; d < head_size; d += kLanes) store(out + d, load(out + d) * correction);
}

// out += weights x values, R registers of channels at a time; every other key has sums of its own,
// so that one addition need not wait for another.
template <int R, typename S>
inline void add_channels(const float* weights, const S* values, int64_t head_size, int64_t n,
                         float* out) {
  Vector even[R], odd[R];
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) {
    even[i] = load(out + i * kLanes);
    odd[i] = Vector{};
  }
  const auto add = [&](Vector (&sums)[R], int64_t j) {
    const Vector weight = splat(weights[j]);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      sums[i] = fused(weight, load(values + j * head_size + i * kLanes), sums[i]);
    }
  };
  int64_t j = 0;
  for (; j + 2 <= n; j += 2) {
    add(even, j);
    add(odd, j + 1);
  }
  if (j < n) add(even, j);
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) store(out + i * kLanes, even[i] + odd[i]);
}

template <typename S>
inline void add_values(const float* weights, const S* values, int64_t head_size, int64_t n,
                       int64_t ahead, float* out) {
  fetch(values + ahead, n * head_size);
  int64_t d = 0;
  for (; d + 4 * kLanes <= head_size; d += 4 * kLanes) {
    add_channels<4>(weights, values + d, head_size, n, out + d);
  }
  for (; d < head_size; d += kLanes) {
    add_channels<1>(weights, values + d, head_size, n, out + d);
  }
}

// The rows of some KV heads of one sequence, and their running softmax.
template <typename S>
class Group {
 public:
  // in_group: query heads of a KV head.
  Group(const Cache<S>& cache, int64_t in_group)
      : cache_(cache),
        in_group_(in_group),
        queries_(cache.kv_heads * in_group * cache.head_size),
        out_(queries_.size()),
        states_(cache.kv_heads * in_group) {}

  // q, out: S[heads, head_size] of the KV heads from `first` up to `last`.  Blocks are the outer
  // loop: the heads of a block lie one after another in memory.
  void run(const S* q, float scale, const int64_t* table, int64_t first, int64_t last,
           int64_t length, S* out) {
    const int64_t size = cache_.head_size, block_size = cache_.block_size;
    const int64_t heads = (last - first) * in_group_;
    const Vector factor = splat(scale * kLog2E);  // weights are powers of two
    for (int64_t d = 0; d < heads * size; d += kLanes) {
      store(queries_.data() + d, load(q + d) * factor);
    }
    std::fill_n(out_.begin(), heads * size, 0.0f);
    std::fill(states_.begin(), states_.end(), Head{-std::numeric_limits<float>::infinity(), 0.0f});
    for (int64_t start = 0; start < length; start += block_size) {
      const int64_t in_block = std::min(block_size, length - start);
      for (int64_t kv_head = first; kv_head < last; ++kv_head) {
        const int64_t base = cache_.at(table[start / block_size], kv_head);
        for (int64_t piece = 0; piece < in_block; piece += kPieceKeys) {
          const int64_t n = std::min<int64_t>(kPieceKeys, in_block - piece);
          attend(base + piece * size, n, (kv_head - first) * in_group_);
        }
      }
    }
    for (int64_t h = 0; h < heads; ++h) {
      const Vector share = splat(1.0f / states_[h].sum);
      for (int64_t d = h * size; d < (h + 1) * size; d += kLanes) {
        store(out + d, load(out_.data() + d) * share);
      }
    }
  }

 private:
  void attend(int64_t place, int64_t n, int64_t first_head) {
    const int64_t size = cache_.head_size, ahead = cache_.block_size * size;
    alignas(64) float scores[kPieceKeys];
    for (int64_t h = first_head; h < first_head + in_group_; ++h) {
      score(queries_.data() + h * size, cache_.keys + place, size, n, ahead, scores);
      float* out = out_.data() + h * size;
      weigh(states_[h], scores, n, out, size);
      add_values(scores, cache_.values + place, size, n, ahead, out);
    }
  }

  const Cache<S>& cache_;
  int64_t in_group_;
  std::vector<float> queries_;
  std::vector<float> out_;
  std::vector<Head> states_;
};

constexpr int64_t kEnoughRows = 8;  // from so many sequences on, every thread computes whole ones

// Running sequences, as Python hands them over: see attention.py.
//
// q: [batch, heads, head_size] in the cache's numbers, rows `step` of them apart; row i attends to the
// first lengths[i] positions of the block table that begins at tables[table_starts[i]].  out: [batch,
// heads, head_size], in the same numbers.
struct Running {
  const void* q;
  int64_t step;
  int64_t heads;
  void* out;
  const int64_t* tables;
  const int64_t* table_starts;
  const int64_t* lengths;
  int64_t batch;
};

// Called by all members of a region.
template <typename S>
void attend(Member& member, const Running& rows, const Cache<S>& cache, float scale) {
  const int64_t in_group = rows.heads / cache.kv_heads;
  const int64_t at_once = rows.batch >= kEnoughRows ? cache.kv_heads : 1;
  const int64_t groups = cache.kv_heads / at_once;
  Group<S> group(cache, in_group);
  member.take(rows.batch * groups, [&](int64_t place) {
    const int64_t i = place / groups, kv_head = place % groups * at_once;
    const int64_t first = kv_head * in_group * cache.head_size;
    const S* q = static_cast<const S*>(rows.q) + i * rows.step + first;
    S* out = static_cast<S*>(rows.out) + i * rows.heads * cache.head_size + first;
    group.run(q, scale, rows.tables + rows.table_starts[i], kv_head, kv_head + at_once,
              rows.lengths[i], out);
  });
}

}  // namespace nightjar
