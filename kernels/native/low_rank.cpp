// Products of low rank, x @ down @ up, added to rows of a projection's result: a product of its own
// for each group of rows.
//
// The inner numbers of a tile of rows stay in registers and on the stack.  Every sum is taken in FP32
// over ascending inputs, in a lane of its own: its bits depend on neither the other rows nor the
// height of its tile.  A group costs rank * (inputs + outputs) products a row, and its factors are
// read once for each tile: from memory the first time, then from a core's cache.

#include <vector>

#include "product.h"

namespace nightjar {
namespace {

constexpr int64_t kMostRanks = 512;  // low_rank.py leaves more to torch
constexpr int kTileRows = 4;
constexpr int kAtOnce = 4;  // vectors of outputs: 4 x 4 sums

// A product, as Python hands it over: see low_rank.py.
//
// down: float[inputs, ranks]; up: float[rank, stride]; ranks, stride: padded with zeros to a multiple
// of 16; outputs, begin: the columns of the result that it is added to.
struct LowRank {
  const float* down;
  const float* up;
  int64_t inputs;
  int64_t ranks;
  int64_t rank;
  int64_t stride;
  int64_t outputs;
  int64_t begin;
};

// Rows [row, row + height) of x, and their product.
struct Tile {
  const LowRank* product;
  int64_t row;
  int64_t height;
};

// inner[r] = x[r] @ down, for R rows.
template <int R>
void narrow(const LowRank& product, const float* x, int64_t x_stride, float* inner) {
  for (int64_t j = 0; j < product.ranks; j += kLanes) {
    Vector sums[R] = {};
    const float* down = product.down + j;
    for (int64_t k = 0; k < product.inputs; ++k, down += product.ranks) {
      const Vector factor = load(down);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sums[r] = fused(splat(x[r * x_stride + k]), factor, sums[r]);
    }
    for (int r = 0; r < R; ++r) store(inner + r * kMostRanks + j, sums[r]);
  }
}

// y[rows[r]] += inner[r] @ up, for R rows and V vectors of outputs from `column` on.
template <int R, int V>
void widen(const LowRank& product, const float* inner, const int64_t* rows, int64_t column, float* y,
           int64_t y_stride) {
  Vector sums[R][V] = {};
  const float* up = product.up + column;
  for (int64_t k = 0; k < product.rank; ++k, up += product.stride) {
    Vector factors[V];
    for (int v = 0; v < V; ++v) factors[v] = load(up + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vector x = splat(inner[r * kMostRanks + k]);
      for (int v = 0; v < V; ++v) sums[r][v] = fused(x, factors[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    float* to = y + rows[r] * y_stride + product.begin + column;
    for (int v = 0; v < V; ++v) {
      const int64_t width = product.outputs - column - v * kLanes;
      store_lanes(reinterpret_cast<Addend*>(to + v * kLanes), sums[r][v], width);
    }
  }
}

template <int R>
void compute(const LowRank& product, const float* x, int64_t x_stride, const int64_t* rows, float* y,
             int64_t y_stride) {
  alignas(64) float inner[R * kMostRanks];
  narrow<R>(product, x, x_stride, inner);
  int64_t column = 0;
  for (; column + kAtOnce * kLanes <= product.stride; column += kAtOnce * kLanes) {
    widen<R, kAtOnce>(product, inner, rows, column, y, y_stride);
  }
  for (; column < product.stride; column += kLanes) {
    widen<R, 1>(product, inner, rows, column, y, y_stride);
  }
}

// By the number of rows.
constexpr void (*kComputes[])(const LowRank&, const float*, int64_t, const int64_t*, float*,
                              int64_t) = {nullptr, compute<1>, compute<2>, compute<3>, compute<4>};
static_assert(std::size(kComputes) == kTileRows + 1);

}  // namespace
}  // namespace nightjar

using namespace nightjar;

// y[rows[i]] += x[i] @ down @ up for the rows [begins[p], ends[p]) of each product.  y, x: float,
// y_stride and x_stride numbers a row; no row of y occurs twice.
extern "C" void add_low_rank(float* y, int64_t y_stride, const float* x, int64_t x_stride,
                             const int64_t* rows, const LowRank* const* products,
                             const int64_t* begins, const int64_t* ends, int64_t n_products) {
  std::vector<Tile> tiles;
  for (int64_t p = 0; p < n_products; ++p) {
    for (int64_t row = begins[p]; row < ends[p]; row += kTileRows) {
      tiles.push_back({products[p], row, std::min<int64_t>(kTileRows, ends[p] - row)});
    }
  }
  expect_regions();
  parallel([&](Member& member) {
    member.take(static_cast<int64_t>(tiles.size()), [&](int64_t i) {
      const Tile& tile = tiles[i];
      kComputes[tile.height](*tile.product, x + tile.row * x_stride, x_stride, rows + tile.row, y,
                             y_stride);
    });
  });
}
