// One tile of attention: a few query rows of one head, against keys that come in pieces.
//
// The rows lie in the lanes.  Scores of a piece are K x Q^T, so the softmax over keys is a sum over
// vectors, never within one; no row sees another, and a row's bits depend on its own keys and on how
// they are cut into pieces, which must be a matter of the sequence alone.
#pragma once

#include <vector>

#include "common.h"

namespace nightjar {

constexpr int kTileRows = 2 * kLanes;  // query rows of a tile: two registers
constexpr int kPieceKeys = 32;         // keys whose scores are held at once
constexpr int kMicroRows = 8;          // 8 x 2 accumulators of a product

// out[r][0..2 kLanes) = sum over k of a(r, k) * b(k, lanes), on top of what `out` holds, times
// factors[r], if kAdd.
//
// a(r, k) = a[r * row_step + k * step]; row k of b begins at b + k * b_step, row r of out at
// out + r * out_step.  The sum runs in ascending k, whatever R is.  kHalf: one register wide.
template <int R, bool kAdd, bool kHalf>
inline void multiply_rows(const float* a, int64_t row_step, int64_t step, const float* b,
                          int64_t b_step, int64_t depth, const float* factors, float* out,
                          int64_t out_step) {
  Vector low[R], high[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    low[r] = high[r] = Vector{};
    if constexpr (kAdd) {
      const Vector factor = splat(factors[r]);
      low[r] = load(out + r * out_step) * factor;
      if (!kHalf) high[r] = load(out + r * out_step + kLanes) * factor;
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vector first = load(b + k * b_step);
    const Vector second = kHalf ? Vector{} : load(b + k * b_step + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vector factor = splat(a[r * row_step + k * step]);
      low[r] = fused(factor, first, low[r]);
      if (!kHalf) high[r] = fused(factor, second, high[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    store(out + r * out_step, low[r]);
    if (!kHalf) store(out + r * out_step + kLanes, high[r]);
  }
}

template <bool kAdd, bool kHalf>
inline void multiply_up_to(int64_t rows, const float* a, int64_t row_step, int64_t step,
                           const float* b, int64_t b_step, int64_t depth, const float* factors,
                           float* out, int64_t out_step) {
  const auto factors_of = [=](int64_t r) { return kAdd ? factors + r : nullptr; };
  int64_t r = 0;
  for (; r + kMicroRows <= rows; r += kMicroRows) {
    multiply_rows<kMicroRows, kAdd, kHalf>(a + r * row_step, row_step, step, b, b_step, depth,
                                           factors_of(r), out + r * out_step, out_step);
  }
  for (; r + 2 <= rows; r += 2) {
    multiply_rows<2, kAdd, kHalf>(a + r * row_step, row_step, step, b, b_step, depth,
                                  factors_of(r), out + r * out_step, out_step);
  }
  for (; r < rows; ++r) {
    multiply_rows<1, kAdd, kHalf>(a + r * row_step, row_step, step, b, b_step, depth,
                                  factors_of(r), out + r * out_step, out_step);
  }
}

// The state of a tile; one a thread, used again for tile after tile.
class Tile {
 public:
  explicit Tile(int64_t head_size)
      : head_size_(head_size),
        queries_(head_size * kTileRows),
        out_(kTileRows * head_size),
        room_(2 * kPieceKeys * head_size) {}

  // Room for the keys and values of a piece.
  float* room() { return room_.data(); }

  // Begin with `rows` query rows, row_step numbers apart, whose scores are multiplied by `scale`.
  template <typename S>
  void begin(const S* q, int64_t row_step, int64_t rows, float scale) {
    rows_ = rows;
    const Vector factor = splat(scale * kLog2E);  // weights are powers of two
    for (int64_t first = 0; first < rows; first += kLanes) {
      for (int64_t d = 0; d < head_size_; d += kLanes) {
        Vector block[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          block[r] = first + r < rows ? load(q + (first + r) * row_step + d) * factor : Vector{};
        }
        transpose(block);
        for (int i = 0; i < kLanes; ++i) {
          store(queries_.data() + (d + i) * kTileRows + first, block[i]);
        }
      }
    }
    fresh_ = true;
    std::fill(peaks_, peaks_ + kTileRows, -std::numeric_limits<float>::infinity());
    std::fill(sums_, sums_ + kTileRows, 0.0f);
  }

  // Attend to keys 0..n-1 (n <= kPieceKeys), key_step floats apart; row r sees the first
  // visible[r] of them (any number: below 1 none, from n on all).
  void attend(const float* keys, int64_t key_step, const float* values, int64_t value_step,
              int64_t n, const int32_t* visible) {
    score(keys, key_step, n, visible);
    for (int64_t first = 0; first < rows_; first += kLanes) {
      const int32_t least = *std::min_element(visible + first, visible + first + kLanes);
      if (least >= n) {
        weigh<false>(n, visible + first, first);
      } else {
        weigh<true>(n, visible + first, first);
      }
    }
    for (int64_t first = 0; first < rows_; first += kMicroRows) {
      const int64_t rows = std::min<int64_t>(kMicroRows, rows_ - first);
      // Keys that none of these rows sees weigh nothing.
      const int32_t most = *std::max_element(visible + first, visible + first + rows);
      const int64_t depth = std::clamp<int64_t>(most, 0, n);
      if (fresh_) {
        add_values<false>(first, rows, values, value_step, depth);
      } else if (depth > 0) {  // or the peaks are what they were
        add_values<true>(first, rows, values, value_step, depth);
      }
    }
    fresh_ = false;
  }

  // Write the tile's rows, out_step numbers apart; returns whether all are finite.
  template <typename S>
  bool finish(S* out, int64_t out_step) const {
    Vector off{};  // what a number is off itself: nothing, if it is finite
    for (int64_t r = 0; r < rows_; ++r) {
      const Vector share = splat(1.0f / sums_[r]);
      for (int64_t d = 0; d < head_size_; d += kLanes) {
        const Vector x = load(out_.data() + r * head_size_ + d) * share;
        off += x - x;
        store(out + r * out_step + d, x);
      }
    }
    return sum_of(off) == 0.0f;
  }

 private:
  // Scores of n keys, a register of rows left out where none of them sees the key.
  void score(const float* keys, int64_t key_step, int64_t n, const int32_t* visible) {
    const bool narrow = rows_ <= kLanes;
    const int32_t low = *std::max_element(visible, visible + kLanes);
    const int32_t high = narrow ? 0 : *std::max_element(visible + kLanes, visible + kTileRows);
    const int64_t both = std::clamp<int64_t>(std::min(low, high), 0, n);
    multiply_up_to<false, false>(both, keys, key_step, 1, queries_.data(), kTileRows, head_size_,
                                 nullptr, scores_, kTileRows);
    const int64_t one = std::clamp<int64_t>(std::max(low, high), 0, n);
    const int64_t place = low < high ? kLanes : 0;
    multiply_up_to<false, true>(one - both, keys + both * key_step, key_step, 1,
                                queries_.data() + place, kTileRows, head_size_, nullptr,
                                scores_ + both * kTileRows + place, kTileRows);
  }

  // Scores of kLanes rows, from `first` on, to softmax weights, and what was summed so far to the
  // new peak (Milakov and Gimelshein, arXiv 1805.02867).  A NaN among the scores is in the sum.
  // kHides: some row does not see all keys.
  template <bool kHides>
  void weigh(int64_t n, const int32_t* visible, int64_t first) {
    Whole seen;
    std::memcpy(&seen, visible, sizeof(seen));
    const Vector before = load(peaks_ + first);
    constexpr int kChains = 4;  // a maximum need not wait for the one before it
    Vector chains[kChains] = {before, before, before, before};
    const auto look = [&](Vector& peaks, int32_t j) {
      const Vector score = load(scores_ + j * kTileRows + first);
      peaks = larger(!kHides || j < seen ? score : peaks, peaks);
    };
    int32_t j = 0;
    for (; j + kChains <= n; j += kChains) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) look(chains[c], j + c);
    }
    for (; j < n; ++j) look(chains[0], j);
    const Vector peaks = larger(larger(chains[0], chains[1]), larger(chains[2], chains[3]));
    // A row that has seen nothing yet keeps its zeros: -inf less -inf is no number.
    const Vector correction = seen > 0 ? power_of_two(before - peaks) : splat(1.0f);
    Vector sums = load(sums_ + first) * correction;
    for (int32_t j = 0; j < n; ++j) {
      float* place = scores_ + j * kTileRows + first;
      Vector weight = power_of_two(load(place) - peaks);
      if constexpr (kHides) weight = j < seen ? weight : Vector{};
      store(place, weight);
      sums += weight;
    }
    store(peaks_ + first, peaks);
    store(sums_ + first, sums);
    store(corrections_ + first, correction);
  }

  // Rows from `first` on take in the values of `depth` keys, on top of what they hold, brought to the
  // new peak, if kAdd.
  template <bool kAdd>
  void add_values(int64_t first, int64_t rows, const float* values, int64_t value_step,
                  int64_t depth) {
    const float* weights = scores_ + first;
    const float* factors = corrections_ + first;
    float* out = out_.data() + first * head_size_;
    int64_t d = 0;
    for (; d + 2 * kLanes <= head_size_; d += 2 * kLanes) {
      multiply_up_to<kAdd, false>(rows, weights, 1, kTileRows, values + d, value_step, depth,
                                  factors, out + d, head_size_);
    }
    for (; d < head_size_; d += kLanes) {
      multiply_up_to<kAdd, true>(rows, weights, 1, kTileRows, values + d, value_step, depth,
                                 factors, out + d, head_size_);
    }
  }

  int64_t head_size_;
  int64_t rows_ = 0;
  bool fresh_ = true;  // nothing was attended to: what out_ and sums_ hold counts for nothing
  std::vector<float> queries_;  // [head_size][kTileRows], scaled
  std::vector<float> out_;      // [kTileRows][head_size]
  std::vector<float> room_;     // [2][kPieceKeys][head_size]
  alignas(64) float scores_[kPieceKeys * kTileRows];
  alignas(64) float peaks_[kTileRows];
  alignas(64) float sums_[kTileRows];
  alignas(64) float corrections_[kTileRows];  // of what was summed up to the last peak
};

// attend(first, n): n rows of a tile from `first` on by themselves, whether all become finite.  A hidden
// key weighs nothing, but nothing times an infinite value is no number: so that no row's bits are a
// matter of its neighbours, each attends again alone where one is not finite.
template <typename Attend>
void attend_apart(int64_t rows, Attend attend) {
  if (attend(0, rows) || rows == 1) return;
  for (int64_t r = 0; r < rows; ++r) attend(r, 1);
}

// One layer of the paged cache: keys and values S[blocks, kv_heads, block_size, head_size].  Heads
// come and leave in the same numbers; S: float or Half.
template <typename S>
struct Cache {
  S* keys;
  S* values;
  int64_t kv_heads;
  int64_t block_size;
  int64_t head_size;

  int64_t at(int64_t block, int64_t kv_head) const {
    return (block * kv_heads + kv_head) * block_size * head_size;
  }
};

// Numbers in FP32: where they lie, or widened into `room`.
inline const float* widened(const float* from, int64_t, float*) { return from; }

inline const float* widened(const Half* from, int64_t n, float* room) {
  for (int64_t i = 0; i < n; i += kLanes) store(room + i, load(from + i));
  return room;
}

// Attend to the first `length` positions of a block table, piece by piece in ascending order.  Row r
// sees those before limits[r].
template <typename S>
void attend_paged(Tile& tile, const Cache<S>& cache, const int64_t* table, int64_t kv_head,
                  int64_t length, const int32_t* limits) {
  alignas(64) int32_t visible[kTileRows];
  const int64_t size = cache.head_size;
  for (int64_t start = 0; start < length; start += cache.block_size) {
    const int64_t base = cache.at(table[start / cache.block_size], kv_head);
    const int64_t in_block = std::min(cache.block_size, length - start);
    for (int64_t first = 0; first < in_block; first += kPieceKeys) {
      for (int r = 0; r < kTileRows; ++r) {
        visible[r] = limits[r] - static_cast<int32_t>(start + first);
      }
      const int64_t place = base + first * size, n = std::min<int64_t>(kPieceKeys, in_block - first);
      float* room = tile.room();
      const float* keys = widened(cache.keys + place, n * size, room);
      const float* values = widened(cache.values + place, n * size, room + kPieceKeys * size);
      tile.attend(keys, size, values, size, n, visible);
    }
  }
}

}  // namespace nightjar
