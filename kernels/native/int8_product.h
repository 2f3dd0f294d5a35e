// Products of quantised rows with int8 weights: multiplied, scaled back and sent through the
// activation in one pass over the data.
//
// A weight row (an output channel) and an activation row each have one scale; the sums are exact
// int32, so a row's result does not depend on the other rows.  See reference/int8_linear.py.
#pragma once

#include <vector>

#include "activation.h"
#include "norm.h"

#if defined(__AVX512VNNI__)

namespace nightjar {

constexpr int kColumns = 32;      // of a panel: two registers of int32
constexpr int kTileRows = 12;     // 12 x 2 accumulators leave room in 32 registers for the operands
constexpr int kBytes = 4;         // products that one instruction adds up in a lane
constexpr int kZero = 128;        // activations are stored unsigned: value + kZero
constexpr float kLimit = 127.0f;  // largest absolute value of a quantised activation
constexpr float kLeastPeak = 1e-30f;      // a row of zeros needs some scale
constexpr int64_t kBlockBytes = 1 << 18;  // activations that stay in a core's cache
constexpr int64_t kAheadBytes = 1024;     // of a panel, on the way into the nearest cache

// What is kept in half precision between two products is divided by this, a power of two: the
// largest number that fits is then 1.6e7, and what is lost below 0.015 is less than a hundredth of
// a quantised step of any row with a peak above that.
constexpr float kHalfScale = 256.0f;

// A weight, as Python hands it over: see int8_linear.py.
//
// panels: int8[n, stride / 4, 32, 4]; offsets: int32, 128 times the sum of the weight's row, scales
// and bias: float, each [n * 32].  inputs, stride: numbers of a row, and those rounded up to 4.
// gated: each panel holds 16 columns, their gates first.
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

// Quantised rows: values [rows, stride], and what one step of each is worth.
struct Rows {
  uint8_t* values;
  float* scales;
};

// The lanes of a row from i on, zeros past its k numbers.
inline __m512 lanes_at(const float* x, int64_t i, int64_t k) {
  const int64_t left = k - i;
  return left >= kLanes ? _mm512_loadu_ps(x + i)
                        : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << left) - 1), x + i);
}

inline __m512 lanes_at(const Half* x, int64_t i, int64_t k) {
  const int64_t left = k - i;
  const __m256i bits = left >= kLanes
                           ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i))
                           : _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1 << left) - 1), x + i);
  return _mm512_cvtph_ps(bits);
}

// Scales a row by its largest absolute value onto -kLimit..kLimit.
//
// The peak is taken over the numbers' bits, where NaN is larger than infinity: a row that is not
// finite gets a scale, and so a result, that is not finite.
template <typename X>
inline void quantize_row(const X* x, int64_t k, int64_t stride, uint8_t* out, float* scale) {
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += kLanes) {
    const __m512i bits = _mm512_castps_si512(_mm512_abs_ps(lanes_at(x, i, k)));
    top = _mm512_max_epi32(top, bits);
  }
  const int32_t bits = _mm512_reduce_max_epi32(top);
  float peak;
  std::memcpy(&peak, &bits, sizeof(peak));
  peak = peak < kLeastPeak ? kLeastPeak : peak;
  *scale = peak / kLimit * (sizeof(X) < sizeof(float) ? kHalfScale : 1.0f);
  const __m512 inverse = _mm512_set1_ps(kLimit / peak);
  const __m512i zero = _mm512_set1_epi32(kZero);
  for (int64_t i = 0; i < stride; i += kLanes) {
    // Rounded to nearest even.
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(lanes_at(x, i, k), inverse));
    const __mmask16 kept = stride - i >= kLanes ? 0xffff : (1 << (stride - i)) - 1;
    _mm512_mask_cvtepi32_storeu_epi8(out + i, kept, _mm512_add_epi32(rounded, zero));
  }
}

// What to fetch while a tile is computed: its share of the next panel, `step` bytes at a time.
struct Ahead {
  const int8_t* from;
  int64_t step;
};

// The int32 sums of R rows and the columns of one panel: [R, kColumns].
template <int R>
inline void multiply(const uint8_t* values, int64_t stride, const int8_t* panel, Ahead ahead,
                     int32_t* sums) {
  __m512i low[R], high[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_si512();
  for (int64_t k = 0; k < stride; k += kBytes) {
    const __m512i first = _mm512_loadu_si512(panel + k * kColumns);
    const __m512i second = _mm512_loadu_si512(panel + k * kColumns + 64);
    _mm_prefetch(reinterpret_cast<const char*>(panel + k * kColumns + kAheadBytes), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(panel + k * kColumns + kAheadBytes + 64),
                 _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(ahead.from), _MM_HINT_T1);
    ahead.from += ahead.step;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int32_t word;
      std::memcpy(&word, values + r * stride + k, sizeof(word));
      const __m512i pair = _mm512_set1_epi32(word);
      // Written out, as GCC 12 keeps the accumulators of the intrinsic in memory.
      asm("vpdpbusd %2, %1, %0" : "+v"(low[r]) : "v"(pair), "v"(first));
      asm("vpdpbusd %2, %1, %0" : "+v"(high[r]) : "v"(pair), "v"(second));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    _mm512_store_si512(sums + r * kColumns, low[r]);
    _mm512_store_si512(sums + r * kColumns + kLanes, high[r]);
  }
}

// What kLanes columns add to the sums of any row.
struct Channels {
  __m512i offsets;
  Vector scales;
  Vector bias;

  Channels(const Weight& weight, int64_t column)
      : offsets(_mm512_loadu_si512(weight.offsets + column)),
        scales(load(weight.scales + column)),
        bias(load(weight.bias + column)) {}

  // Sums of one row, scaled back and with the bias.
  Vector finished(const int32_t* sums, Vector row_scale) const {
    const __m512i exact = _mm512_sub_epi32(_mm512_load_si512(sums), offsets);
    return reinterpret_cast<Vector>(_mm512_cvtepi32_ps(exact)) * scales * row_scale + bias;
  }
};

inline Vector kept(Vector x, const float*) { return x; }
inline Vector kept(Vector x, const Half*) { return x * splat(1.0f / kHalfScale); }

// One tile of the result, of R rows and the columns of one panel.
template <int A, bool kGated, typename Out, int R>
void tile(const Weight& weight, const Rows& rows, Out* result, int64_t row, int64_t panel,
          Ahead ahead) {
  constexpr int kWidth = kGated ? kColumns / 2 : kColumns;
  const int64_t column = panel * kColumns, columns = weight.columns;
  alignas(64) int32_t sums[R * kColumns];
  multiply<R>(rows.values + row * weight.stride, weight.stride,
              weight.panels + column * weight.stride, ahead, sums);
  const Channels low(weight, column), high(weight, column + kLanes);
  const int64_t width = std::min<int64_t>(kWidth, columns - panel * kWidth);
  Out* to = result + row * columns + panel * kWidth;
  for (int r = 0; r < R; ++r, to += columns) {
    const int32_t* place = sums + r * kColumns;
    const Vector scale = splat(rows.scales[row + r]);
    const Vector first = activated<A>(low.finished(place, scale));
    const Vector second = high.finished(place + kLanes, scale);
    alignas(64) Out part[kColumns];
    Out* whole = width == kWidth ? to : part;
    if constexpr (kGated) {
      store(whole, kept(first * second, whole));
    } else {
      store(whole, kept(first, whole));
      store(whole + kLanes, kept(activated<A>(second), whole));
    }
    if (whole != to) std::memcpy(to, part, width * sizeof(Out));
  }
}

template <typename Out>
using TileOf = void (*)(const Weight&, const Rows&, Out*, int64_t, int64_t, Ahead);

// By the number of rows.
template <int A, bool kGated, typename Out>
constexpr TileOf<Out> kTiles[] = {nullptr,
                                  tile<A, kGated, Out, 1>,  tile<A, kGated, Out, 2>,
                                  tile<A, kGated, Out, 3>,  tile<A, kGated, Out, 4>,
                                  tile<A, kGated, Out, 5>,  tile<A, kGated, Out, 6>,
                                  tile<A, kGated, Out, 7>,  tile<A, kGated, Out, 8>,
                                  tile<A, kGated, Out, 9>,  tile<A, kGated, Out, 10>,
                                  tile<A, kGated, Out, 11>, tile<A, kGated, Out, 12>};

template <bool kGated, typename Out>
const TileOf<Out>* tiles_of(int64_t activation) {
  switch (activation) {
    case kGeluTanh: return kTiles<kGeluTanh, kGated, Out>;
    case kGelu: return kTiles<kGelu, kGated, Out>;
    case kRelu: return kTiles<kRelu, kGated, Out>;
    case kSilu: return kTiles<kSilu, kGated, Out>;
    default: return kTiles<kNone, kGated, Out>;
  }
}

// out[n_rows, columns] = activation(rows x weight + bias); with a gated weight,
// activation(gates) * the product with the other halves.  Called by all threads of a team.
template <typename Out>
void multiply_all(const Weight& weight, const Rows& rows, int64_t n_rows, int64_t activation,
                   Out* out) {
  const TileOf<Out>* tiles =
      weight.gated ? tiles_of<true, Out>(activation) : tiles_of<false, Out>(activation);
  const int64_t width = weight.gated ? kColumns / 2 : kColumns, stride = weight.stride;
  const int64_t n_panels = (weight.columns + width - 1) / width;
  // Tiles of nearly equal height; blocks of tiles that stay in the cache over all panels.
  const int64_t n_tiles = (n_rows + kTileRows - 1) / kTileRows;
  const int64_t in_block = std::max<int64_t>(1, kBlockBytes / (stride * kTileRows));
  const int64_t n_blocks = (n_tiles + in_block - 1) / in_block;
  // Neighbouring panels in one hand: the next one is on its way when it is needed.
#pragma omp for collapse(2) schedule(dynamic, 2)
  for (int64_t block = 0; block < n_blocks; ++block) {
    for (int64_t panel = 0; panel < n_panels; ++panel) {
      const int64_t begin = block * in_block, end = std::min(n_tiles, begin + in_block);
      const int8_t* next = weight.panels + (panel + 1) % n_panels * kColumns * stride;
      const int64_t step = kColumns * kBytes / (end - begin);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = n_rows * i / n_tiles, last = n_rows * (i + 1) / n_tiles;
        const Ahead ahead{next + (i - begin) * step * stride / kBytes, step};
        tiles[last - first](weight, rows, out, first, panel, ahead);
      }
    }
  }
}

// Quantises x [n_rows, weight.inputs], rows x_stride numbers apart.  Called by all threads of a team.
template <typename X>
void quantize_rows(const X* x, int64_t x_stride, int64_t n_rows, const Weight& weight,
                   const Rows& rows) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < n_rows; ++row) {
    quantize_row(x + row * x_stride, weight.inputs, weight.stride,
                 rows.values + row * weight.stride, rows.scales + row);
  }
}

// The same of the normalised residual stream, which takes in delta first.
inline void quantize_normalized(const Norm& norm, float* residual, const float* delta,
                                int64_t n_rows, const Weight& weight, const Rows& rows) {
  std::vector<float> normal(norm.size);
#pragma omp for schedule(static)
  for (int64_t row = 0; row < n_rows; ++row) {
    const int64_t place = row * norm.size;
    normalize(norm, residual + place, delta == nullptr ? nullptr : delta + place, normal.data());
    quantize_row(normal.data(), norm.size, weight.stride, rows.values + row * weight.stride,
                 rows.scales + row);
  }
}

}  // namespace nightjar

#endif
