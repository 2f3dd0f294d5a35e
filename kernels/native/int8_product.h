// Products of quantised rows with int8 weights: multiplied, scaled back and sent through the
// activation in one pass over the data.
//
// A weight row (an output channel) and an activation row each have one scale; the sums are exact
// int32, so a row's result does not depend on the other rows.  See reference/int8_linear.py.
#pragma once

#include <type_traits>
#include <vector>

#include "low_rank.h"

#if defined(__AVX512VNNI__)

namespace nightjar {

constexpr int kRegisters = 4;     // of int32 sums, side by side in a panel
constexpr int kColumns = kRegisters * kLanes;  // of a panel
constexpr int kVectorRows = 6;    // 6 x 4 accumulators leave room in 32 registers for the operands
#if NIGHTJAR_TILE_REGISTERS
constexpr int kByteRows = kRegisterRows;
#else
constexpr int kByteRows = kVectorRows;
#endif
constexpr int kBytes = 4;         // products that one instruction adds up in a lane
constexpr int kByteRun = kRun<uint8_t>;
constexpr int kZero = 128;        // activations are stored unsigned: value + kZero
constexpr float kLimit = 127.0f;  // largest absolute value of a quantised activation
constexpr float kLeastPeak = 1e-30f;      // a row of zeros needs some scale
constexpr int64_t kBlockBytes = 1 << 18;  // activations that stay in a core's cache

// A number between a feed-forward block's two products: in half precision, divided by a power of two.
// The largest that fits is then 1.6e7, and what is lost below 0.015 is less than a hundredth of a
// quantised step of any row with a peak above that.
struct Inner {
  static constexpr float kScale = 256.0f;

  Half scaled;

  explicit operator float() const { return static_cast<float>(scaled) * kScale; }
};

inline Vector widened(const Inner* x) { return load(&x->scaled) * splat(Inner::kScale); }
inline void store(Inner* to, Vector x) { store(&to->scaled, x * splat(1.0f / Inner::kScale)); }

// A weight, as Python hands it over: see int8_linear.py.
//
// panels: int8[n, stride / 4, 64, 4]; offsets: int32, -128 times the sum of the weight's row, scales
// and bias: float, each [n * 64].  inputs, stride: numbers of a row, and those rounded up to a run.
// gated: each panel holds 32 columns, their gates first.
struct Weight {
  const int8_t* panels;
  const int32_t* offsets;
  const float* scales;
  const float* bias;
  int64_t inputs;
  int64_t stride;
  int64_t columns;
  int64_t gated;
};

// Few rows are multiplied sooner by vectors than in tile registers; the sums are the same.
inline Tiles byte_tiles(int64_t n_rows) {
  return Tiles(n_rows, n_rows <= 2 * kVectorRows ? kVectorRows : kByteRows);
}

// Quantised rows in tiles, and the size of one step of each.
struct Rows {
  uint8_t* values;
  float* scales;
};

template <>
struct RoomOf<Weight> {
  Rows rows;
  Inner* inner;

  static RoomOf keep(int64_t n_rows, int64_t stride, int64_t inner) {
    void* rows = room_for(kRows, n_rows * (stride + static_cast<int64_t>(sizeof(float))));
    uint8_t* values = static_cast<uint8_t*>(rows);
    return {{values, reinterpret_cast<float*>(values + n_rows * stride)},
            static_cast<Inner*>(room_for(kInner, n_rows * inner * sizeof(Inner)))};
  }
};

// The first `n` lanes, fewer than all; none if n is negative.
inline __mmask16 first_lanes(int64_t n) { return n > 0 ? static_cast<__mmask16>((1 << n) - 1) : 0; }

// The lanes of a row from i on, zeros past its k numbers.
inline __m512 lanes_at(const float* x, int64_t i, int64_t k) {
  const int64_t left = k - i;
  return left >= kLanes ? _mm512_loadu_ps(x + i) : _mm512_maskz_loadu_ps(first_lanes(left), x + i);
}

inline __m512 lanes_at(const Half* x, int64_t i, int64_t k) {
  const int64_t left = k - i;
  const __m256i bits = left >= kLanes
                           ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i))
                           : _mm256_maskz_loadu_epi16(first_lanes(left), x + i);
  return _mm512_cvtph_ps(bits);
}

// As they lie there, divided.
inline __m512 lanes_at(const Inner* x, int64_t i, int64_t k) { return lanes_at(&x->scaled, i, k); }

// The largest absolute value of a row.  It is taken over the numbers' bits, where NaN is larger than
// infinity.
inline float peak_of(const float* x, int64_t k) {
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += kLanes) {
    const __m512i bits = _mm512_castps_si512(_mm512_abs_ps(lanes_at(x, i, k)));
    top = _mm512_max_epi32(top, bits);
  }
  const int32_t bits = _mm512_reduce_max_epi32(top);
  float peak;
  std::memcpy(&peak, &bits, sizeof(peak));
  return peak;
}

inline float peak_of(const Half* x, int64_t k) {
  constexpr int kAtOnce = 2 * kLanes;
  const __m512i number = _mm512_set1_epi16(0x7fff);  // all but the sign
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += kAtOnce) {
    const int64_t left = k - i;
    const __mmask32 there = left >= kAtOnce ? ~0u : (1u << left) - 1;
    const __m512i bits = _mm512_maskz_loadu_epi16(there, x + i);
    top = _mm512_max_epu16(top, _mm512_and_si512(bits, number));
  }
  // Two of them in each lane.
  const __m512i low = _mm512_and_si512(top, _mm512_set1_epi32(0xffff));
  const int32_t most = _mm512_reduce_max_epi32(_mm512_max_epi32(low, _mm512_srli_epi32(top, 16)));
  const uint16_t bits = static_cast<uint16_t>(most);
  Half peak;
  std::memcpy(&peak, &bits, sizeof(peak));
  return static_cast<float>(peak);
}

inline float peak_of(const Inner* x, int64_t k) { return peak_of(&x->scaled, k); }

// Scales a row by its largest absolute value onto -kLimit..kLimit, into its place `out` in a tile of
// `height` rows.
//
// A row that is not finite gets a scale, and so a result, that is not finite.
template <typename X>
inline void quantize_row(const X* x, int64_t k, int64_t stride, int64_t height, uint8_t* out,
                         float* scale) {
  float peak = peak_of(x, k);
  peak = peak < kLeastPeak ? kLeastPeak : peak;
  *scale = peak / kLimit * (std::is_same_v<X, Inner> ? Inner::kScale : 1.0f);
  const __m512 inverse = _mm512_set1_ps(kLimit / peak);
  const __m512i zero = _mm512_set1_epi32(kZero);
  for (int64_t run = 0; run < stride; run += kByteRun, out += height * kByteRun) {
#pragma GCC unroll 4
    for (int i = 0; i < kByteRun; i += kLanes) {
      // Rounded to nearest even.
      const __m512 scaled = _mm512_mul_ps(lanes_at(x, run + i, k), inverse);
      const __m512i rounded = _mm512_cvtps_epi32(scaled);
      const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(rounded, zero));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), bytes);
    }
  }
}

// The int32 sums of a tile of R rows and the columns of one panel, without what the rows' zero adds
// to them: [kRegisters, R, kLanes].
//
// A call of its own: inlined into what stores its sums, GCC 12 keeps them in memory all the time.
template <int R>
[[gnu::noinline]] void multiply(const uint8_t* values, int64_t stride, const int8_t* panel,
                                const int32_t* offsets, Ahead ahead, int32_t* sums) {
  __m512i a[R], b[R], c[R], d[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    a[r] = _mm512_loadu_si512(offsets);
    b[r] = _mm512_loadu_si512(offsets + kLanes);
    c[r] = _mm512_loadu_si512(offsets + 2 * kLanes);
    d[r] = _mm512_loadu_si512(offsets + 3 * kLanes);
  }
  for (int64_t k = 0; k < stride; k += kByteRun, values += R * kByteRun) {
#pragma GCC unroll 4
    for (int word = 0; word < kByteRun / kBytes; ++word, panel += kColumns * kBytes) {
      __m512i w[kRegisters];
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        w[i] = _mm512_loadu_si512(panel + i * kLine);
        _mm_prefetch(reinterpret_cast<const char*>(panel + kAheadBytes + i * kLine), _MM_HINT_T0);
      }
      ahead.fetch();
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        int32_t bytes;
        std::memcpy(&bytes, values + r * kByteRun + word * kBytes, sizeof(bytes));
        const __m512i x = _mm512_set1_epi32(bytes);
        // Written out, as GCC 12 keeps the accumulators of the intrinsic in memory.
        asm("vpdpbusd %2, %1, %0" : "+v"(a[r]) : "v"(x), "v"(w[0]));
        asm("vpdpbusd %2, %1, %0" : "+v"(b[r]) : "v"(x), "v"(w[1]));
        asm("vpdpbusd %2, %1, %0" : "+v"(c[r]) : "v"(x), "v"(w[2]));
        asm("vpdpbusd %2, %1, %0" : "+v"(d[r]) : "v"(x), "v"(w[3]));
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    _mm512_store_si512(sums + r * kLanes, a[r]);
    _mm512_store_si512(sums + (R + r) * kLanes, b[r]);
    _mm512_store_si512(sums + (2 * R + r) * kLanes, c[r]);
    _mm512_store_si512(sums + (3 * R + r) * kLanes, d[r]);
  }
}

#if NIGHTJAR_TILE_REGISTERS
// In the registers that TileRegisters has set up for this height: an instruction multiplies 16 words of
// all rows with those of 16 channels.
[[gnu::noinline]] inline void multiply_in_tiles(const uint8_t* values, int64_t height, int64_t stride,
                                                const int8_t* panel, const int32_t* offsets,
                                                Ahead ahead, int32_t* sums) {
  constexpr int kWordBytes = kColumns * kBytes;  // of a panel
  _tile_loadd(0, offsets, 0);  // the same in every row
  _tile_loadd(1, offsets + kLanes, 0);
  _tile_loadd(2, offsets + 2 * kLanes, 0);
  _tile_loadd(3, offsets + 3 * kLanes, 0);
  for (int64_t k = 0; k < stride; k += kByteRun, values += height * kByteRun) {
    _tile_loadd(4, values, kLine);
    _tile_loadd(5, panel, kWordBytes);
    _tile_dpbusd(0, 4, 5);
    _tile_loadd(6, panel + kLine, kWordBytes);
    _tile_dpbusd(1, 4, 6);
    _tile_loadd(7, panel + 2 * kLine, kWordBytes);
    _tile_dpbusd(2, 4, 7);
    _tile_loadd(5, panel + 3 * kLine, kWordBytes);
    _tile_dpbusd(3, 4, 5);
    for (int word = 0; word < kByteRun / kBytes; ++word, panel += kWordBytes) {
      for (int line = 0; line < kWordBytes; line += kLine) {
        _mm_prefetch(reinterpret_cast<const char*>(panel + kAheadBytes + line), _MM_HINT_T0);
      }
      ahead.fetch();
    }
  }
  _tile_stored(0, sums, kLine);
  _tile_stored(1, sums + height * kLanes, kLine);
  _tile_stored(2, sums + 2 * height * kLanes, kLine);
  _tile_stored(3, sums + 3 * height * kLanes, kLine);
}
#endif

using Multiply = void (*)(const uint8_t*, int64_t, const int8_t*, const int32_t*, Ahead, int32_t*);

// By the number of rows.
constexpr Multiply kMultiply[] = {nullptr,     multiply<1>, multiply<2>, multiply<3>,
                                  multiply<4>, multiply<5>, multiply<6>};

inline void multiply_tile(const uint8_t* values, int64_t height, int64_t stride, const int8_t* panel,
                          const int32_t* offsets, Ahead ahead, int32_t* sums) {
#if NIGHTJAR_TILE_REGISTERS
  if (height > kVectorRows) {
    return multiply_in_tiles(values, height, stride, panel, offsets, ahead, sums);
  }
#endif
  kMultiply[height](values, stride, panel, offsets, ahead, sums);
}

// What kLanes columns add to the sums of any row.
struct Channels {
  Vector scales;
  Vector bias;

  Channels(const Weight& weight, int64_t column)
      : scales(load(weight.scales + column)), bias(load(weight.bias + column)) {}

  // Sums of one row, scaled back and with the bias.
  Vector finished(const int32_t* sums, Vector row_scale) const {
    const __m512 exact = _mm512_cvtepi32_ps(_mm512_load_si512(sums));
    return reinterpret_cast<Vector>(exact) * scales * row_scale + bias;
  }
};

// What is added to `height` rows from `row` on, in the order of a tile's sums: [kRegisters, height,
// kLanes].  A row without an adapter gets negative zeros, which change no number.  Returns whether there
// is anything.
template <bool kGated>
bool more_of(const Added& added, int64_t row, int64_t height, int64_t column, float* more) {
  constexpr int kHalf = kRegisters / 2;
  std::fill(more, more + kRegisters * height * kLanes, -0.0f);
  if constexpr (!kGated) return added.widen(row, height, column, kRegisters, false, more);
  const bool gates = added.widen(row, height, column, kHalf, false, more);
  return added.widen(row, height, column, kHalf, true, more + kHalf * height * kLanes) || gates;
}

// One tile of the result: `height` rows from `row` on and the columns of one panel.
template <int A, bool kGated, typename Out>
void tile(const Weight& weight, const Rows& rows, Out* result, const Added& added, int64_t row,
          int64_t height, int64_t panel, Ahead ahead) {
  constexpr int kSums = kRegisters * kByteRows * kLanes;
  constexpr int kResults = kGated ? kRegisters / 2 : kRegisters, kWidth = kResults * kLanes;
  const int64_t column = panel * kColumns, columns = weight.columns;
  Out* to = result + row * columns + panel * kWidth;
  // The result's lines are prefetched now and are in the cache when the sums are ready.
  for (int64_t r = 0; r < height; ++r) fetch_to_write(to + r * columns, kWidth);
  alignas(64) int32_t sums[kSums];
  multiply_tile(rows.values + row * weight.stride, height, weight.stride,
                weight.panels + column * weight.stride, weight.offsets + column, ahead, sums);
  alignas(64) float more[kSums];
  const bool has_more = added && more_of<kGated>(added, row, height, panel * kWidth, more);
  for (int i = 0; i < kResults; ++i) {
    const int64_t width = columns - panel * kWidth - i * kLanes;
    const int32_t* place = sums + i * height * kLanes;
    const Channels channels(weight, column + i * kLanes);
    const Channels gated(weight, column + (kGated ? kWidth : 0) + i * kLanes);
    for (int64_t r = 0; r < height; ++r, place += kLanes) {
      const Vector scale = splat(rows.scales[row + r]);
      Vector x = channels.finished(place, scale);
      if (has_more) x = x + load(more + (place - sums));
      x = activated<A, std::is_same_v<Out, Inner>>(x);
      if constexpr (kGated) {
        const int32_t* other = place + kResults * height * kLanes;
        Vector y = gated.finished(other, scale);
        if (has_more) y = y + load(more + (other - sums));
        x = x * y;
      }
      store_lanes(to + r * columns + i * kLanes, x, width);
    }
  }
}

template <typename Out>
using TileOf = void (*)(const Weight&, const Rows&, Out*, const Added&, int64_t, int64_t, int64_t,
                        Ahead);

template <bool kGated, typename Out>
TileOf<Out> tile_of(int64_t activation) {
  if constexpr (!std::is_same_v<Out, float> && !std::is_same_v<Out, Inner>) {
    return tile<kNone, kGated, Out>;  // no activation is asked for there
  }
  switch (activation) {
    case kGeluTanh: return tile<kGeluTanh, kGated, Out>;
    case kGelu: return tile<kGelu, kGated, Out>;
    case kRelu: return tile<kRelu, kGated, Out>;
    case kSilu: return tile<kSilu, kGated, Out>;
    default: return tile<kNone, kGated, Out>;
  }
}

// out[n_rows, columns] = activation(rows x weight + bias + what is added); with a gated weight,
// activation(gates) * the product with the other halves.  Called by all members of a region.
template <typename Out>
void multiply_all(Member& member, const Weight& weight, const Rows& rows, int64_t n_rows,
                  int64_t activation, Out* out, const Added& added) {
  const auto tile =
      weight.gated ? tile_of<true, Out>(activation) : tile_of<false, Out>(activation);
  const int64_t width = weight.gated ? kColumns / 2 : kColumns, stride = weight.stride;
  const Panels panels{weight.panels, (weight.columns + width - 1) / width, kColumns * stride,
                      kColumns * kBytes};
  const Tiles cut = byte_tiles(n_rows);
  TileRegisters registers(cut.height(0) > kVectorRows ? kRegisters : 0);
  take_tiles(member, cut, panels, kBlockBytes / (stride * kByteRows),
             [&](int64_t i, int64_t panel, Ahead ahead) {
               registers.set_up(cut.height(i));
               tile(weight, rows, out, added, cut.first_row(i), cut.height(i), panel, ahead);
             });
}

// Quantises the rows that `row_at` finds, tile by tile.  Called by all members of a region.
template <typename RowAt>
void quantize_tiles(Member& member, int64_t n_rows, const Weight& weight, const Rows& rows,
                    RowAt row_at) {
  share_rows(member, byte_tiles(n_rows), [&](int64_t row, int64_t first, int64_t height) {
    uint8_t* place = rows.values + first * weight.stride + (row - first) * kByteRun;
    quantize_row(row_at(row), weight.inputs, weight.stride, height, place, rows.scales + row);
  });
}

// Quantises x [n_rows, weight.inputs], rows x_stride numbers apart.  Called by all members of a
// region.
template <typename X>
void quantize_rows(Member& member, const X* x, int64_t x_stride, int64_t n_rows,
                   const Weight& weight, const Rows& rows) {
  quantize_tiles(member, n_rows, weight, rows, [=, &weight](int64_t row) {
    fetch(x + (row + 1) * x_stride, weight.inputs);
    return x + row * x_stride;
  });
}

// The same of the normalised residual stream.
inline void quantize_normalized(Member& member, const Stream& stream, int64_t n_rows,
                                const Weight& weight, const Rows& rows) {
  std::vector<float> normal(stream.norm.size);
  quantize_tiles(member, n_rows, weight, rows, [&](int64_t row) {
    stream.normalized(row, normal.data());
    return normal.data();
  });
}

// out = activation(x @ weight.T + bias + what is added).  What out is made of if not floats takes no
// activation.  Called by all members of a region, as the next ones.
inline void linear(Member& member, const RoomOf<Weight>& room, const RowsIn& x, int64_t n_rows,
                   const Weight& weight, int64_t activation, const RowsOut& out,
                   const Added& every) {
  in_parts(n_rows, [&](int64_t first, int64_t n) {
    const Added added = every.from(first);
    with_rows(x, [&](const auto* rows) {
      const auto* part = rows + first * x.stride;
      quantize_rows(member, part, x.stride, n, weight, room.rows);
      narrow(member, added, part, x.stride, weight.inputs);
    });
    with_rows(out, [&](auto* rows) {
      auto* to = rows + first * weight.columns;
      multiply_all(member, weight, room.rows, n, activation, to, added);
    });
  });
}

// The same of the normalised residual stream, without an activation.
inline void normed_linear(Member& member, const RoomOf<Weight>& room, const Stream& stream,
                          int64_t n_rows, const Weight& weight, const RowsOut& out,
                          const Added& every) {
  in_parts(n_rows, [&](int64_t first, int64_t n) {
    const Added added = every.from(first);
    quantize_normalized(member, stream.from(first), n, weight, room.rows);
    narrow_normalized(member, added, stream.from(first));
    with_rows(out, [&](auto* rows) {
      multiply_all(member, weight, room.rows, n, kNone, rows + first * weight.columns, added);
    });
  });
}

// And of a whole feed-forward block: out = activation(norm(residual) @ up) @ down.
inline void feed_forward(Member& member, const RoomOf<Weight>& room, const Stream& stream,
                         int64_t n_rows, const Weight& up, int64_t activation, const Weight& down,
                         const RowsOut& out, const Added& to_up, const Added& to_down) {
  in_parts(n_rows, [&](int64_t first, int64_t n) {
    const Added up_added = to_up.from(first), down_added = to_down.from(first);
    quantize_normalized(member, stream.from(first), n, up, room.rows);
    narrow_normalized(member, up_added, stream.from(first));
    multiply_all(member, up, room.rows, n, activation, room.inner, up_added);
    quantize_rows(member, room.inner, up.columns, n, down, room.rows);
    narrow(member, down_added, room.inner, up.columns, down.inputs);
    with_rows(out, [&](auto* rows) {
      auto* to = rows + first * down.columns;
      multiply_all(member, down, room.rows, n, kNone, to, down_added);
    });
  });
}

}  // namespace nightjar

#endif
