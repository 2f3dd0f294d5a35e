// Products of rows with FP32 weights, through the activation in the same pass.
//
// Every sum is taken by fused multiply-adds over ascending inputs, in a lane of its own: its bits
// depend on neither the other rows nor the height of its tile.
#pragma once

#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "product.h"

#if defined(__AVX512F__) || defined(__FMA__)

namespace nightjar {

#if defined(__AVX512F__)
constexpr int kFloatTileRows = 8;  // 8 x 3 accumulators leave room in 32 registers for the operands
#else
constexpr int kFloatTileRows = 4;  // 4 x 3 in 16
#endif
constexpr int kFloatRegisters = 3;  // of sums, side by side in a panel
constexpr int kFloatColumns = kFloatRegisters * kLanes;  // of a panel
constexpr int64_t kFloatBlockBytes = 1 << 19;            // of rows that stay in a core's cache

// A weight, as Python hands it over: see float_linear.py.
//
// panels: float[n, stride, columns of a panel]; bias: float[n * columns of a panel], or half of that
// for a gated weight, whose even panels hold gates and the odd ones after them what they gate.
// inputs, stride: numbers of a row, and those rounded up to 16.
struct FloatWeight {
  const float* panels;
  const float* bias;
  int64_t inputs;
  int64_t stride;
  int64_t columns;
  int64_t gated;
};

inline Tiles float_tiles(int64_t n_rows) { return Tiles(n_rows, kFloatTileRows); }

// Rows in tiles of `stride` numbers a row: what a product reads, and where one may write for the next.
struct TiledRows {
  static constexpr bool kTakesActivations = true;

  float* values;
  int64_t stride;

  float* at(int64_t row, int64_t first, int64_t height, int64_t column) const {
    const int64_t segment = column / kSegment, within = column % kSegment;
    return values + first * stride + (segment * height + row - first) * kSegment + within;
  }
  // Of kLanes columns from this one, how many there are room for.  Those past the product's columns
  // are zeros, as the next one wants them.
  int64_t room(int64_t column) const { return stride - column; }
  void fetch(int64_t, int64_t, int64_t) const {}
};

template <>
struct RoomOf<FloatWeight> {
  float* rows;
  float* inner;

  static RoomOf keep(int64_t n_rows, int64_t stride, int64_t inner) {
    const int64_t filled = (inner + kSegment - 1) / kSegment * kSegment;
    return {room(kRows, n_rows * stride), room(kInner, n_rows * filled)};
  }

 private:
  static float* room(RoomFor place, int64_t numbers) {
    return static_cast<float*>(room_for(place, numbers * static_cast<int64_t>(sizeof(float))));
  }
};

// Rows one after another.
template <typename Out>
struct PlainRows {
  static constexpr bool kTakesActivations = std::is_same_v<Out, float>;

  Out* values;
  int64_t columns;

  Out* at(int64_t row, int64_t, int64_t, int64_t column) const {
    return values + row * columns + column;
  }
  int64_t room(int64_t column) const { return columns - column; }
  // The result's lines are asked for now and are there when the sums are.
  void fetch(int64_t row, int64_t height, int64_t column) const {
    for (int64_t r = row; r < row + height; ++r) {
      fetch_to_write(at(r, row, height, column), kFloatColumns);
    }
  }
};

// Writes a row of `inputs` numbers into its tile, and zeros after them.
template <typename X>
void tile_row(const X* x, int64_t inputs, const TiledRows& rows, int64_t row, int64_t first,
              int64_t height) {
  for (int64_t k = 0; k < rows.stride; k += kSegment) {
    float* to = rows.at(row, first, height, k);
    const int64_t left = std::min<int64_t>(kSegment, inputs - k);
    if (left == kSegment) {
      for (int i = 0; i < kSegment; i += kLanes) store(to + i, load(x + k + i));
    } else {
      std::fill(std::copy_n(x + k, left, to), to + kSegment, 0.0f);
    }
  }
}

// The sums of a tile of R rows and the columns of one panel: [kFloatRegisters, R, kLanes].
//
// A call of its own, as in int8_product.h.
template <int R>
[[gnu::noinline]] void multiply_floats(const float* values, int64_t stride, const float* panel,
                                       Ahead ahead, float* sums) {
  Vector a[R], b[R], c[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) a[r] = b[r] = c[r] = Vector{};
  for (int64_t k = 0; k < stride; k += kSegment, values += R * kSegment) {
#pragma GCC unroll 4
    for (int i = 0; i < kSegment; ++i, panel += kFloatColumns) {
      const Vector u = load(panel), v = load(panel + kLanes), w = load(panel + 2 * kLanes);
      for (int j = 0; j < kFloatColumns; j += kLine / static_cast<int>(sizeof(float))) {
        __builtin_prefetch(reinterpret_cast<const char*>(panel + j) + kAheadBytes);
      }
      ahead.fetch();
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vector x = splat(values[r * kSegment + i]);
        a[r] = fused(x, u, a[r]);
        b[r] = fused(x, v, b[r]);
        c[r] = fused(x, w, c[r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    store(sums + r * kLanes, a[r]);
    store(sums + (R + r) * kLanes, b[r]);
    store(sums + (2 * R + r) * kLanes, c[r]);
  }
}

using MultiplyFloats = void (*)(const float*, int64_t, const float*, Ahead, float*);

// By the number of rows, from one on.
template <size_t... R>
constexpr std::array<MultiplyFloats, sizeof...(R)> multiplies(std::index_sequence<R...>) {
  return {multiply_floats<R + 1>...};
}
constexpr auto kMultiplyFloats = multiplies(std::make_index_sequence<kFloatTileRows>());

// One tile of the result: `height` rows from `row` on and the columns of one panel.
template <int A, bool kGated, typename To>
void float_tile(const FloatWeight& weight, const TiledRows& rows, const To& to, int64_t row,
                int64_t height, int64_t panel, Ahead ahead) {
  constexpr int kSums = kFloatTileRows * kFloatColumns;
  constexpr int kParts = kGated ? 2 : 1;
  const int64_t panel_size = weight.stride * kFloatColumns;
  const float* weights = weight.panels + panel * kParts * panel_size;
  const float* bias = weight.bias + panel * kParts * kFloatColumns;
  to.fetch(row, height, panel * kFloatColumns);
  alignas(64) float sums[kParts * kSums];
  for (int part = 0; part < kParts; ++part) {
    kMultiplyFloats[height - 1](rows.values + row * weight.stride, weight.stride,
                                weights + part * panel_size, ahead, sums + part * kSums);
    ahead.from += weight.stride * ahead.step;
  }
  for (int i = 0; i < kFloatColumns; i += kLanes) {
    const int64_t column = panel * kFloatColumns + i, room = to.room(column);
    if (room <= 0) return;
    const float* place = sums + i * height;
    for (int64_t r = 0; r < height; ++r, place += kLanes) {
      Vector x = activated<A>(load(place) + load(bias + i));
      if constexpr (kGated) x = x * (load(place + kSums) + load(bias + kFloatColumns + i));
      store_lanes(to.at(row + r, row, height, column), x, room);
    }
  }
}

template <typename To>
using FloatTileOf = void (*)(const FloatWeight&, const TiledRows&, const To&, int64_t, int64_t,
                             int64_t, Ahead);

template <bool kGated, typename To>
FloatTileOf<To> float_tile_of(int64_t activation) {
  if constexpr (!To::kTakesActivations) return float_tile<kNone, kGated, To>;
  switch (activation) {
    case kGeluTanh: return float_tile<kGeluTanh, kGated, To>;
    case kGelu: return float_tile<kGelu, kGated, To>;
    case kRelu: return float_tile<kRelu, kGated, To>;
    case kSilu: return float_tile<kSilu, kGated, To>;
    default: return float_tile<kNone, kGated, To>;
  }
}

// to = activation(rows x weight + bias); with a gated weight, activation(gates) * the product with
// what they gate.  Called by all members of a region.
template <typename To>
void multiply_all(Member& member, const FloatWeight& weight, const TiledRows& rows, int64_t n_rows,
                  int64_t activation, const To& to) {
  const auto tile =
      weight.gated ? float_tile_of<true, To>(activation) : float_tile_of<false, To>(activation);
  const Tiles cut = float_tiles(n_rows);
  const int64_t row_bytes = weight.stride * static_cast<int64_t>(sizeof(float));
  const int64_t n_panels = (weight.columns + kFloatColumns - 1) / kFloatColumns;
  const Panels panels{weight.panels, n_panels, row_bytes * kFloatColumns * (weight.gated ? 2 : 1),
                      kFloatColumns * static_cast<int64_t>(sizeof(float))};
  take_tiles(member, cut, panels, kFloatBlockBytes / (row_bytes * kFloatTileRows),
             [&](int64_t i, int64_t panel, Ahead ahead) {
               tile(weight, rows, to, cut.first_row(i), cut.height(i), panel, ahead);
             });
}

// Lays out x [n_rows, weight.inputs], rows x_stride numbers apart.  Called by all members of a region.
template <typename X>
void tile_rows(Member& member, const X* x, int64_t x_stride, int64_t n_rows, int64_t inputs,
               const TiledRows& rows) {
  share_rows(member, float_tiles(n_rows), [&](int64_t row, int64_t first, int64_t height) {
    fetch(x + (row + 1) * x_stride, inputs);
    tile_row(x + row * x_stride, inputs, rows, row, first, height);
  });
}

// The same of the normalised residual stream.
inline void tile_normalized(Member& member, const Stream& stream, int64_t n_rows,
                            const TiledRows& rows) {
  std::vector<float> normal(stream.norm.size);
  share_rows(member, float_tiles(n_rows), [&](int64_t row, int64_t first, int64_t height) {
    stream.normalized(row, normal.data());
    tile_row(normal.data(), stream.norm.size, rows, row, first, height);
  });
}

// out = activation(x @ weight.T + bias).  What out is made of if not floats takes no activation.
// Called by all members of a region, as the next ones.
inline void linear(Member& member, const RoomOf<FloatWeight>& room, const RowsIn& x, int64_t n_rows,
                   const FloatWeight& weight, int64_t activation, const RowsOut& out) {
  const TiledRows tiled{room.rows, weight.stride};
  in_parts(n_rows, [&](int64_t first, int64_t n) {
    with_rows(x, [&](const auto* rows) {
      tile_rows(member, rows + first * x.stride, x.stride, n, weight.inputs, tiled);
    });
    with_rows(out, [&](auto* rows) {
      const PlainRows to{rows + first * weight.columns, weight.columns};
      multiply_all(member, weight, tiled, n, activation, to);
    });
  });
}

// The same of the normalised residual stream, without an activation.
inline void normed_linear(Member& member, const RoomOf<FloatWeight>& room, const Stream& stream,
                          int64_t n_rows, const FloatWeight& weight, const RowsOut& out) {
  const TiledRows tiled{room.rows, weight.stride};
  in_parts(n_rows, [&](int64_t first, int64_t n) {
    tile_normalized(member, stream.from(first), n, tiled);
    with_rows(out, [&](auto* rows) {
      const PlainRows to{rows + first * weight.columns, weight.columns};
      multiply_all(member, weight, tiled, n, kNone, to);
    });
  });
}

// And of a whole feed-forward block: out = activation(norm(residual) @ up) @ down.  The first product
// writes its rows as the second reads them.
inline void feed_forward(Member& member, const RoomOf<FloatWeight>& room, const Stream& stream,
                         int64_t n_rows, const FloatWeight& up, int64_t activation,
                         const FloatWeight& down, const RowsOut& out) {
  const TiledRows tiled{room.rows, up.stride}, inner{room.inner, down.stride};
  in_parts(n_rows, [&](int64_t first, int64_t n) {
    tile_normalized(member, stream.from(first), n, tiled);
    multiply_all(member, up, tiled, n, activation, inner);
    with_rows(out, [&](auto* rows) {
      const PlainRows to{rows + first * down.columns, down.columns};
      multiply_all(member, down, inner, n, kNone, to);
    });
  });
}

}  // namespace nightjar

#endif
