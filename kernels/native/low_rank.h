// Products of low rank, x @ down @ up, that adapters add to the projections of their rows.
//
// A step's rows may have different adapters, or none.  A projection is computed for all rows
// together.  Before it, rows of one adapter are multiplied with `down` together, which reads a factor
// from memory once; the results, `ranks` numbers a row, are kept.  They are multiplied with `up` where
// a tile of the projection lies in registers and the nearest cache, before its activation.
//
// Every sum is taken in FP32 in an order that is always the same, in a lane of its own: a row's bits
// depend on neither the other rows nor their number.  A product costs rank * (inputs + outputs)
// multiplications a row, beside inputs * outputs of its projection.
#pragma once

#include <vector>

#include "product.h"

namespace nightjar {

#if defined(__AVX512F__)
constexpr int kMostTogether = 8;  // rows: 8 x 2 sums leave room in 32 registers for the operands
#else
constexpr int kMostTogether = 4;
#endif
constexpr int64_t kLowRankBlock = 16;  // outputs that lie together in `up`

// A product, as Python hands it over: see low_rank.py.
//
// down: float[inputs, ranks], ranks padded with zeros to a multiple of 16; up: float[blocks, rank,
// kLowRankBlock], of the outputs from block first_block of the projection on; gated: whether it is
// added to the gated half of a gated weight, not to its gates; place: of its numbers among those that
// are kept of a row.
struct LowRank {
  const float* down;
  const float* up;
  int64_t inputs;
  int64_t ranks;
  int64_t rank;
  int64_t first_block;
  int64_t blocks;
  int64_t gated;
  int64_t place;
};

// Those of one adapter for one projection.
struct LowRanks {
  const LowRank* products;
  int64_t count;

  const LowRank* begin() const { return products; }
  const LowRank* end() const { return products + count; }
};

// The projections of a layer, as low_rank.py counts them.
enum Place { kQueryKeyValue, kAttentionOut, kUp, kDown, kPlaces };

// Which rows of a step have which adapter, as Python hands it over: see low_rank.py.
//
// owners: int64[T], the adapter of each row, -1 for none; rows: int64[M], those with one, each
// adapter's ascending, from starts[adapter] on; factors: [adapters, layers, kPlaces]; ranks: the most
// numbers that are kept of a row.
struct AdaptedRows {
  const int64_t* owners;
  const int64_t* rows;
  const int64_t* starts;
  int64_t adapters;
  const LowRanks* factors;
  int64_t layers;
  int64_t ranks;
};

// Neighbours in AdaptedRows::rows, of one adapter, in one part (see in_parts).
struct RowsTogether {
  int64_t adapter;
  const int64_t* rows;
  int64_t height;
};

class LowRankStep;

// What is added to one projection in the rows from `first` on; nothing without a step.
class Added {
 public:
  Added() = default;
  Added(const LowRankStep* step, int64_t place) : step_(step), place_(place) {}

  explicit operator bool() const { return step_ != nullptr; }
  Added from(int64_t first) const;

  // Multiplies the part's rows with `down`.  fill(row, to): writes the projection's inputs of a row to
  // float[inputs].  Called by all members of a region.
  template <typename Fill>
  void narrow(Member& member, int64_t inputs, Fill fill) const;

  // Adds to sums[vectors, height, kLanes]: of `height` rows from `row` on, the columns from `column`
  // on.  Returns whether there was anything to add.
  bool widen(int64_t row, int64_t height, int64_t column, int64_t vectors, bool gated,
             float* sums) const;

 private:
  const LowRanks& of(int64_t adapter) const;

  const LowRankStep* step_ = nullptr;
  int64_t place_ = 0;  // in AdaptedRows::factors, of the first adapter
  int64_t first_ = 0;
};

// The adapted rows of a call; the caller of the region makes it.
class LowRankStep {
 public:
  // told: null for none.
  explicit LowRankStep(const AdaptedRows* told);

  // What is added to a projection of a layer.
  Added at(int64_t layer, Place place) const;

 private:
  friend class Added;

  const AdaptedRows* told_;
  std::vector<std::vector<RowsTogether>> parts_;
  float* kept_ = nullptr;  // of a part: [rows, ranks]
};

// Multiplies `height` rows of x, float[height, inputs], with a product's `down`; kept[r]: where the
// numbers of row r go.
void narrow_rows(const LowRank& product, const float* x, int64_t height, float* const* kept);

template <typename Fill>
void Added::narrow(Member& member, int64_t inputs, Fill fill) const {
  if (step_ == nullptr) return;
  const std::vector<RowsTogether>& part = step_->parts_[first_ / kRowsAtOnce];
  const int64_t room = kMostTogether * inputs * static_cast<int64_t>(sizeof(float));
  float* x = static_cast<float*>(room_for(kOwnRows, room));
  member.take(static_cast<int64_t>(part.size()), [&](int64_t i) {
    const RowsTogether& together = part[i];
    const LowRanks& products = of(together.adapter);
    if (products.count == 0) return;
    float* kept[kMostTogether];
    for (int64_t r = 0; r < together.height; ++r) {
      const int64_t row = together.rows[r] - first_;
      fill(row, x + r * inputs);
      kept[r] = step_->kept_ + row * step_->told_->ranks;
    }
    for (const LowRank& product : products) narrow_rows(product, x, together.height, kept);
  });
}

// Of rows x, x_stride numbers apart.  Called by all members of a region, as the next one.
template <typename X>
void narrow(Member& member, const Added& added, const X* x, int64_t x_stride, int64_t inputs) {
  added.narrow(member, inputs, [=](int64_t row, float* to) {
    const X* from = x + row * x_stride;
    int64_t k = 0;
    for (; k + kLanes <= inputs; k += kLanes) store(to + k, widened(from + k));
    for (; k < inputs; ++k) to[k] = static_cast<float>(from[k]);
  });
}

// Of the normalised residual stream, which has taken its delta in.
inline void narrow_normalized(Member& member, const Added& added, const Stream& stream) {
  const Stream complete(stream.norm, stream.residual, nullptr);
  added.narrow(member, stream.norm.size,
               [&](int64_t row, float* to) { complete.normalized(row, to); });
}

}  // namespace nightjar
