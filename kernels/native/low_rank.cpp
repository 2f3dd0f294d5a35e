#include "low_rank.h"

#include <array>
#include <utility>

namespace nightjar {
namespace {

// kept[r] = x[r] @ down, for R rows.  Even and odd inputs have sums of their own: an addition's latency
// is longer than few rows' additions.
template <int R>
void narrow_together(const LowRank& product, const float* x, float* const* kept) {
  const int64_t inputs = product.inputs, ranks = product.ranks;
  for (int64_t j = 0; j < ranks; j += kLanes) {
    Vector even[R] = {}, odd[R] = {};
    const float* down = product.down + j;
    int64_t k = 0;
    for (; k + 1 < inputs; k += 2, down += 2 * ranks) {
      __builtin_prefetch(reinterpret_cast<const char*>(down) + kAheadBytes);
      __builtin_prefetch(reinterpret_cast<const char*>(down + ranks) + kAheadBytes);
      const Vector first = load(down), second = load(down + ranks);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        even[r] = fused(splat(x[r * inputs + k]), first, even[r]);
        odd[r] = fused(splat(x[r * inputs + k + 1]), second, odd[r]);
      }
    }
    if (k < inputs) {
      const Vector last = load(down);
      for (int r = 0; r < R; ++r) even[r] = fused(splat(x[r * inputs + k]), last, even[r]);
    }
    for (int r = 0; r < R; ++r) store(kept[r] + product.place + j, even[r] + odd[r]);
  }
}

// sums[v][r] += kept[r] @ up, for R rows that lie `ranks` numbers apart.  height: rows of `sums`.
template <int R>
void widen_together(const LowRank& product, const float* kept, int64_t ranks, int64_t column,
                    int64_t vectors, int64_t height, float* sums) {
  for (int64_t v = 0; v < vectors; ++v, column += kLanes, sums += height * kLanes) {
    const int64_t block = column / kLowRankBlock - product.first_block;
    if (block < 0 || block >= product.blocks) continue;
    const float* up = product.up + block * product.rank * kLowRankBlock + column % kLowRankBlock;
    Vector found[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) found[r] = load(sums + r * kLanes);
    for (int64_t k = 0; k < product.rank; ++k, up += kLowRankBlock) {
      const Vector factor = load(up);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) found[r] = fused(splat(kept[r * ranks + k]), factor, found[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(sums + r * kLanes, found[r]);
  }
}

using NarrowTogether = void (*)(const LowRank&, const float*, float* const*);
using WidenTogether = void (*)(const LowRank&, const float*, int64_t, int64_t, int64_t, int64_t,
                               float*);

// By the number of rows, from one on.
template <size_t... R>
constexpr std::array<NarrowTogether, sizeof...(R)> narrows(std::index_sequence<R...>) {
  return {narrow_together<R + 1>...};
}
template <size_t... R>
constexpr std::array<WidenTogether, sizeof...(R)> widens(std::index_sequence<R...>) {
  return {widen_together<R + 1>...};
}
constexpr auto kNarrows = narrows(std::make_index_sequence<kMostTogether>());
constexpr auto kWidens = widens(std::make_index_sequence<kMostTogether>());

}  // namespace

void narrow_rows(const LowRank& product, const float* x, int64_t height, float* const* kept) {
  kNarrows[height - 1](product, x, kept);
}

LowRankStep::LowRankStep(const AdaptedRows* told) : told_(told) {
  if (told == nullptr) return;
  int64_t most = 0;  // rows of a part
  for (int64_t adapter = 0; adapter < told->adapters; ++adapter) {
    const int64_t* row = told->rows + told->starts[adapter];
    const int64_t* const last = told->rows + told->starts[adapter + 1];
    while (row < last) {
      const int64_t part = *row / kRowsAtOnce;
      const int64_t* end = row + 1;
      while (end < last && end < row + kMostTogether && *end / kRowsAtOnce == part) ++end;
      if (part >= static_cast<int64_t>(parts_.size())) parts_.resize(part + 1);
      parts_[part].push_back({adapter, row, end - row});
      most = std::max(most, part > 0 ? kRowsAtOnce : end[-1] + 1);
      row = end;
    }
  }
  const int64_t bytes = most * told->ranks * static_cast<int64_t>(sizeof(float));
  kept_ = static_cast<float*>(room_for(kLowRankRows, bytes));
}

Added LowRankStep::at(int64_t layer, Place place) const {
  if (told_ == nullptr) return {};
  const int64_t at = layer * kPlaces + place;
  for (int64_t adapter = 0; adapter < told_->adapters; ++adapter) {
    if (told_->factors[adapter * told_->layers * kPlaces + at].count > 0) return {this, at};
  }
  return {};
}

Added Added::from(int64_t first) const {
  // A part without adapted rows.
  if (step_ == nullptr || first / kRowsAtOnce >= static_cast<int64_t>(step_->parts_.size())) return {};
  Added found = *this;
  found.first_ = first;
  return found;
}

const LowRanks& Added::of(int64_t adapter) const {
  return step_->told_->factors[adapter * step_->told_->layers * kPlaces + place_];
}

bool Added::widen(int64_t row, int64_t height, int64_t column, int64_t vectors, bool gated,
                  float* sums) const {
  const int64_t* owners = step_->told_->owners + first_ + row;
  const int64_t ranks = step_->told_->ranks;
  const float* kept = step_->kept_ + row * ranks;
  bool any = false;
  for (int64_t r = 0, end; r < height; r = end) {
    for (end = r + 1; end < height && end < r + kMostTogether && owners[end] == owners[r];) ++end;
    if (owners[r] < 0) continue;
    for (const LowRank& product : of(owners[r])) {
      if (product.gated != gated) continue;
      kWidens[end - r - 1](product, kept + r * ranks + product.place, ranks, column, vectors, height,
                           sums + r * kLanes);
      any = true;
    }
  }
  return any;
}

}  // namespace nightjar
