// Products of rows with FP32 or bfloat16 weights, through the activation in the same pass.
//
// Every sum is taken in FP32 over ascending inputs, in a lane of its own: its bits depend on neither
// the other rows nor the height of its tile.  With bfloat16 weights the rows are rounded to it, too;
// between two products they are FP32.
#pragma once

#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "low_rank.h"

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

// Numbers that a lane multiplies at once: neighbouring inputs, a word together.
template <typename S>
constexpr int kWord = sizeof(float) / sizeof(S);

// The most rows of a tile, and how many tile registers hold its sums.
template <typename S>
constexpr int kTallest = kFloatTileRows;
template <typename S>
constexpr int kSumRegisters = 0;

#if NIGHTJAR_TILE_REGISTERS
template <>
constexpr int kTallest<Bfloat> = kRegisterRows;
template <>
constexpr int kSumRegisters<Bfloat> = kFloatRegisters;
#endif

// A weight, as Python hands it over: see float_linear.py.  S: what it is stored in.
//
// panels: S[n, stride / kWord, columns of a panel, kWord]; bias: float[n * columns of a panel], or
// half of that for a gated weight, whose even panels hold gates and the odd ones after them what they
// gate.  inputs, stride: numbers of a row, and those rounded up to kRun.
template <typename S>
struct PanelWeight {
  const S* panels;
  const float* bias;
  int64_t inputs;
  int64_t stride;
  int64_t columns;
  int64_t gated;

  int64_t steps() const { return stride / kWord<S>; }
};

using FloatWeight = PanelWeight<float>;
using BfloatWeight = PanelWeight<Bfloat>;

// A word of a row in every lane, and sum + word * weights.
inline Vector spread(const float* word) { return splat(*word); }
inline Vector multiplied(const float*, Vector word, Vector weights, Vector sum) {
  return fused(word, weights, sum);
}

#if defined(__AVX512BF16__)
inline Vector spread(const Bfloat* word) {
  int32_t bits;
  std::memcpy(&bits, word, sizeof(bits));
  return reinterpret_cast<Vector>(_mm512_set1_epi32(bits));
}
inline Vector multiplied(const Bfloat*, Vector word, Vector weights, Vector sum) {
  return reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                   reinterpret_cast<__m512bh>(word),
                                                   reinterpret_cast<__m512bh>(weights)));
}
#endif

template <typename S>
Tiles float_tiles(int64_t n_rows) {
  return Tiles(n_rows, kTallest<S>);
}

// Rows in tiles of `stride` numbers a row: what a product reads, and where one may write for the next.
template <typename S>
struct TiledRows {
  static constexpr bool kTakesActivations = true;

  S* values;
  int64_t stride;

  S* at(int64_t row, int64_t first, int64_t height, int64_t column) const {
    const int64_t run = column / kRun<S>, within = column % kRun<S>;
    return values + first * stride + (run * height + row - first) * kRun<S> + within;
  }
  // Of kLanes columns from this one, how many there are room for.  Those past the product's columns
  // are zeros, as the next one wants them.
  int64_t room(int64_t column) const { return stride - column; }
  void fetch(int64_t, int64_t, int64_t) const {}
};

template <typename S>
struct RoomOf<PanelWeight<S>> {
  S* rows;
  S* inner;

  static RoomOf keep(int64_t n_rows, int64_t stride, int64_t inner) {
    const int64_t filled = (inner + kRun<S> - 1) / kRun<S> * kRun<S>;
    return {room(kRows, n_rows * stride), room(kInner, n_rows * filled)};
  }

 private:
  static S* room(RoomFor place, int64_t numbers) {
    return static_cast<S*>(room_for(place, numbers * static_cast<int64_t>(sizeof(S))));
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
  // The result's lines are prefetched now and are in the cache when the sums are ready.
  void fetch(int64_t row, int64_t height, int64_t column) const {
    for (int64_t r = row; r < row + height; ++r) {
      fetch_to_write(at(r, row, height, column), kFloatColumns);
    }
  }
};

// Writes a row of `inputs` numbers into its tile, and zeros after them.
template <typename X, typename S>
void tile_row(const X* x, int64_t inputs, const TiledRows<S>& rows, int64_t row, int64_t first,
              int64_t height) {
  for (int64_t k = 0; k < rows.stride; k += kRun<S>) {
    S* to = rows.at(row, first, height, k);
    const X* from = x + k;
    X last[kRun<S>] = {};
    if (inputs - k < kRun<S>) {
      std::copy_n(from, inputs - k, last);
      from = last;
    }
    for (int i = 0; i < kRun<S>; i += kLanes) store(to + i, load(from + i));
  }
}

// The sums of a tile of R rows and the columns of one panel: [kFloatRegisters, R, kLanes].
//
// A call of its own, as in int8_product.h.
template <typename S, int R>
[[gnu::noinline]] void multiply_floats(const S* values, int64_t stride, const S* panel,
                                       Ahead ahead, float* sums) {
  constexpr int kStep = kFloatColumns * kWord<S>;  // of a panel
  const auto weights = [&](int place) {  // as they lie, whatever they are
    return load(reinterpret_cast<const float*>(panel) + place * kLanes);
  };
  Vector a[R], b[R], c[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) a[r] = b[r] = c[r] = Vector{};
  for (int64_t k = 0; k < stride; k += kRun<S>, values += R * kRun<S>) {
#pragma GCC unroll 4
    for (int i = 0; i < kRun<S>; i += kWord<S>, panel += kStep) {
      const Vector u = weights(0), v = weights(1), w = weights(2);
      for (int j = 0; j < kStep; j += kLine / static_cast<int>(sizeof(S))) {
        __builtin_prefetch(reinterpret_cast<const char*>(panel + j) + kAheadBytes);
      }
      ahead.fetch();
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vector x = spread(values + r * kRun<S> + i);
        a[r] = multiplied(values, x, u, a[r]);
        b[r] = multiplied(values, x, v, b[r]);
        c[r] = multiplied(values, x, w, c[r]);
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

template <typename S>
using MultiplyFloats = void (*)(const S*, int64_t, const S*, Ahead, float*);

// By the number of rows, from one on.
template <typename S, size_t... R>
constexpr std::array<MultiplyFloats<S>, sizeof...(R)> multiplies(std::index_sequence<R...>) {
  return {multiply_floats<S, R + 1>...};
}
template <typename S>
constexpr auto kMultiplyFloats = multiplies<S>(std::make_index_sequence<kFloatTileRows>());

template <typename S>
void multiply_tile(const S* values, int64_t height, int64_t stride, const S* panel, Ahead ahead,
                   float* sums) {
  kMultiplyFloats<S>[height - 1](values, stride, panel, ahead, sums);
}

#if NIGHTJAR_TILE_REGISTERS
// In the registers that TileRegisters has set up for this height: an instruction multiplies 16 words of
// all rows with those of 16 channels.
[[gnu::noinline]] inline void multiply_tile(const Bfloat* values, int64_t height, int64_t stride,
                                            const Bfloat* panel, Ahead ahead, float* sums) {
  constexpr int kWords = kRun<Bfloat> / kWord<Bfloat>;
  constexpr int kRowBytes = kFloatColumns * static_cast<int>(sizeof(float));  // a word of a panel
  const char* weights = reinterpret_cast<const char*>(panel);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  for (int64_t k = 0; k < stride; k += kRun<Bfloat>, values += height * kRun<Bfloat>) {
    _tile_loadd(3, values, kLine);
    _tile_loadd(4, weights, kRowBytes);
    _tile_dpbf16ps(0, 3, 4);
    _tile_loadd(5, weights + kLine, kRowBytes);
    _tile_dpbf16ps(1, 3, 5);
    _tile_loadd(6, weights + 2 * kLine, kRowBytes);
    _tile_dpbf16ps(2, 3, 6);
    for (int word = 0; word < kWords; ++word, weights += kRowBytes) {
      for (int line = 0; line < kRowBytes; line += kLine) {
        __builtin_prefetch(weights + line + kAheadBytes);
      }
      ahead.fetch();
    }
  }
  _tile_stored(0, sums, kLine);
  _tile_stored(1, sums + height * kLanes, kLine);
  _tile_stored(2, sums + 2 * height * kLanes, kLine);
}
#endif

// One tile of the result: `height` rows from `row` on and the columns of one panel.
template <int A, bool kGated, typename S, typename To>
void float_tile(const PanelWeight<S>& weight, const TiledRows<S>& rows, const To& to,
                const Added& added, int64_t row, int64_t height, int64_t panel, Ahead ahead) {
  constexpr int kSums = kTallest<S> * kFloatColumns;
  constexpr int kParts = kGated ? 2 : 1;
  const int64_t panel_size = weight.stride * kFloatColumns;
  const S* weights = weight.panels + panel * kParts * panel_size;
  const float* bias = weight.bias + panel * kParts * kFloatColumns;
  to.fetch(row, height, panel * kFloatColumns);
  alignas(64) float sums[kParts * kSums];
  for (int part = 0; part < kParts; ++part) {
    multiply_tile(rows.values + row * weight.stride, height, weight.stride,
                  weights + part * panel_size, ahead, sums + part * kSums);
    ahead.from += weight.steps() * ahead.step;
    if (!added) continue;
    added.widen(row, height, panel * kFloatColumns, kFloatRegisters, part == 1, sums + part * kSums);
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
  const int64_t end = (panel + 1) * kFloatColumns;
  if (end < weight.columns) return;
  for (int64_t column = end; to.room(column) > 0; column += kLanes) {
    for (int64_t r = 0; r < height; ++r) {
      store_lanes(to.at(row + r, row, height, column), Vector{}, to.room(column));
    }
  }
}

template <typename S, typename To>
using FloatTileOf = void (*)(const PanelWeight<S>&, const TiledRows<S>&, const To&, const Added&,
                             int64_t, int64_t, int64_t, Ahead);

template <bool kGated, typename S, typename To>
FloatTileOf<S, To> float_tile_of(int64_t activation) {
  if constexpr (!To::kTakesActivations) return float_tile<kNone, kGated, S, To>;
  switch (activation) {
    case kGeluTanh: return float_tile<kGeluTanh, kGated, S, To>;
    case kGelu: return float_tile<kGelu, kGated, S, To>;
    case kRelu: return float_tile<kRelu, kGated, S, To>;
    case kSilu: return float_tile<kSilu, kGated, S, To>;
    default: return float_tile<kNone, kGated, S, To>;
  }
}

// to = activation(rows x weight + bias + what is added); with a gated weight, activation(gates) * the
// product with what they gate.  Called by all members of a region.
template <typename S, typename To>
void multiply_all(Member& member, const PanelWeight<S>& weight, const TiledRows<S>& rows,
                  int64_t n_rows, int64_t activation, const To& to, const Added& added) {
  const auto tile = weight.gated ? float_tile_of<true, S, To>(activation)
                                 : float_tile_of<false, S, To>(activation);
  const Tiles cut = float_tiles<S>(n_rows);
  TileRegisters registers(kSumRegisters<S>);
  const int64_t row_bytes = weight.stride * static_cast<int64_t>(sizeof(S));
  const int64_t n_panels = (weight.columns + kFloatColumns - 1) / kFloatColumns;
  const Panels panels{weight.panels, n_panels, row_bytes * kFloatColumns * (weight.gated ? 2 : 1),
                      kFloatColumns * static_cast<int64_t>(sizeof(float))};
  take_tiles(member, cut, panels, kFloatBlockBytes / (row_bytes * kTallest<S>),
             [&](int64_t i, int64_t panel, Ahead ahead) {
               registers.set_up(cut.height(i));
               tile(weight, rows, to, added, cut.first_row(i), cut.height(i), panel, ahead);
             });
}

// Lays out x [n_rows, weight.inputs], rows x_stride numbers apart.  Called by all members of a region.
template <typename X, typename S>
void tile_rows(Member& member, const X* x, int64_t x_stride, int64_t n_rows, int64_t inputs,
               const TiledRows<S>& rows) {
  share_rows(member, float_tiles<S>(n_rows), [&](int64_t row, int64_t first, int64_t height) {
    fetch(x + (row + 1) * x_stride, inputs);
    tile_row(x + row * x_stride, inputs, rows, row, first, height);
  });
}

// The same of the normalised residual stream.
template <typename S>
void tile_normalized(Member& member, const Stream& stream, int64_t n_rows,
                     const TiledRows<S>& rows) {
  std::vector<float> normal(stream.norm.size);
  share_rows(member, float_tiles<S>(n_rows), [&](int64_t row, int64_t first, int64_t height) {
    stream.normalized(row, normal.data());
    tile_row(normal.data(), stream.norm.size, rows, row, first, height);
  });
}

// Multiplies the adapted ones of rows in tiles with their products' `down`.  Called by all members of
// a region.
template <typename S>
void narrow_tiled(Member& member, const Added& added, const TiledRows<S>& rows, int64_t n_rows,
                  int64_t inputs) {
  const Tiles cut = float_tiles<S>(n_rows);
  added.narrow(member, inputs, [&](int64_t row, float* to) {
    const int64_t tile = cut.tile_of(row), first = cut.first_row(tile), height = cut.height(tile);
    for (int64_t k = 0; k < inputs; k += kLanes) {
      store_lanes(to + k, widened(rows.at(row, first, height, k)), inputs - k);
    }
  });
}

// out = activation(x @ weight.T + bias + what is added).  What out is made of if not floats takes no
// activation.  Called by all members of a region, as the next ones.
template <typename S>
void linear(Member& member, const RoomOf<PanelWeight<S>>& room, const RowsIn& x, int64_t n_rows,
            const PanelWeight<S>& weight, int64_t activation, const RowsOut& out,
            const Added& every) {
  const TiledRows<S> tiled{room.rows, weight.stride};
  in_parts(n_rows, [&](int64_t first, int64_t n) {
    const Added added = every.from(first);
    with_rows(x, [&](const auto* rows) {
      const auto* part = rows + first * x.stride;
      tile_rows(member, part, x.stride, n, weight.inputs, tiled);
      narrow(member, added, part, x.stride, weight.inputs);
    });
    with_rows(out, [&](auto* rows) {
      const PlainRows to{rows + first * weight.columns, weight.columns};
      multiply_all(member, weight, tiled, n, activation, to, added);
    });
  });
}

// The same of the normalised residual stream, without an activation.
template <typename S>
void normed_linear(Member& member, const RoomOf<PanelWeight<S>>& room, const Stream& stream,
                   int64_t n_rows, const PanelWeight<S>& weight, const RowsOut& out,
                   const Added& every) {
  const TiledRows<S> tiled{room.rows, weight.stride};
  in_parts(n_rows, [&](int64_t first, int64_t n) {
    const Added added = every.from(first);
    tile_normalized(member, stream.from(first), n, tiled);
    narrow_normalized(member, added, stream.from(first));
    with_rows(out, [&](auto* rows) {
      const PlainRows to{rows + first * weight.columns, weight.columns};
      multiply_all(member, weight, tiled, n, kNone, to, added);
    });
  });
}

// And of a whole feed-forward block: out = activation(norm(residual) @ up) @ down.  The first product
// writes its rows as the second reads them.
template <typename S>
void feed_forward(Member& member, const RoomOf<PanelWeight<S>>& room, const Stream& stream,
                  int64_t n_rows, const PanelWeight<S>& up, int64_t activation,
                  const PanelWeight<S>& down, const RowsOut& out, const Added& to_up,
                  const Added& to_down) {
  const TiledRows<S> tiled{room.rows, up.stride}, inner{room.inner, down.stride};
  in_parts(n_rows, [&](int64_t first, int64_t n) {
    const Added up_added = to_up.from(first), down_added = to_down.from(first);
    tile_normalized(member, stream.from(first), n, tiled);
    narrow_normalized(member, up_added, stream.from(first));
    multiply_all(member, up, tiled, n, activation, inner, up_added);
    narrow_tiled(member, down_added, inner, n, down.inputs);
    with_rows(out, [&](auto* rows) {
      const PlainRows to{rows + first * down.columns, down.columns};
      multiply_all(member, down, inner, n, kNone, to, down_added);
    });
  });
}

}  // namespace nightjar

#endif
