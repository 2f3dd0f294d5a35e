// Products of FP32 rows with int8 weights: quantised, multiplied, scaled back and sent through the
// activation in one pass over the data.
//
// A weight row (an output channel) and an activation row each have one scale; the sums are exact
// int32, so a row's result does not depend on the other rows.  See reference/int8_linear.py.

#include "common.h"

#if defined(__AVX512VNNI__)

namespace nightjar {
namespace {

enum Activation { kNone = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kSilu = 4 };

constexpr int kColumns = 32;      // of a panel: two registers of int32
constexpr int kTileRows = 12;     // 12 x 2 accumulators leave room in 32 registers for the operands
constexpr int kBytes = 4;         // products that one instruction adds up in a lane
constexpr int kZero = 128;        // activations are stored unsigned: value + kZero
constexpr float kLimit = 127.0f;  // largest absolute value of a quantised activation
constexpr float kLeastPeak = 1e-30f;      // a row of zeros needs some scale
constexpr int64_t kBlockBytes = 1 << 18;  // activations that stay in a core's cache

// 1 / x to about one unit in the last place: an estimate of 14 bits and a step of Newton's, at a
// fraction of a division's cost.
inline Vector reciprocal(Vector x) {
  const Vector estimate = reinterpret_cast<Vector>(_mm512_rcp14_ps(reinterpret_cast<__m512>(x)));
  return estimate * (splat(2.0f) - x * estimate);
}

inline Vector sigmoid(Vector x) { return reciprocal(splat(1.0f) + exponential(-x)); }

// Hendrycks and Gimpel, arXiv 1606.08415: x * sigmoid(2 u) is 0.5 * x * (1 + tanh(u)).
inline Vector gelu_tanh(Vector x) {
  constexpr float slope = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
  return x * sigmoid(x * fused(x * x, splat(slope * 0.044715f), splat(slope)));
}

// 0.5 * x * erfc(-x / sqrt(2)); erfc by the Chebyshev fit of Numerical Recipes (erfcc, relative
// error below 1.2e-7).
inline Vector gelu(Vector x) {
  constexpr float fit[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                           0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  const Vector z = (x < 0.0f ? -x : x) * splat(0.70710678118654752f);
  const Vector t = reciprocal(fused(splat(0.5f), z, splat(1.0f)));
  Vector p = splat(0.17087277f);
  for (float term : fit) p = fused(t, p, splat(term));
  const Vector tail = splat(0.5f) * x * t * exponential(fused(-z, z, p));
  return x < 0.0f ? tail : x - tail;
}

template <int A>
inline Vector activated(Vector x) {
  if constexpr (A == kGeluTanh) return gelu_tanh(x);
  if constexpr (A == kGelu) return gelu(x);
  if constexpr (A == kRelu) return x < 0.0f ? Vector{} : x;
  if constexpr (A == kSilu) return x * sigmoid(x);
  return x;
}

// The lanes of a row from i on, zeros past its k numbers.
inline __m512 lanes_at(const float* x, int64_t i, int64_t k) {
  const int64_t left = k - i;
  return left >= kLanes ? _mm512_loadu_ps(x + i)
                        : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << left) - 1), x + i);
}

// Scales a row by its largest absolute value onto -kLimit..kLimit.
//
// The peak is taken over the numbers' bits, where NaN is larger than infinity: a row that is not
// finite gets a scale, and so a result, that is not finite.
void quantize_row(const float* x, int64_t k, int64_t stride, uint8_t* out, float* scale) {
  __m512i top = _mm512_setzero_si512();
  for (int64_t i = 0; i < k; i += kLanes) {
    const __m512i bits = _mm512_castps_si512(_mm512_abs_ps(lanes_at(x, i, k)));
    top = _mm512_max_epi32(top, bits);
  }
  const int32_t bits = _mm512_reduce_max_epi32(top);
  float peak;
  std::memcpy(&peak, &bits, sizeof(peak));
  peak = peak < kLeastPeak ? kLeastPeak : peak;
  *scale = peak / kLimit;
  const __m512 inverse = _mm512_set1_ps(kLimit / peak);
  const __m512i zero = _mm512_set1_epi32(kZero);
  for (int64_t i = 0; i < stride; i += kLanes) {
    // Rounded to nearest even.
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(lanes_at(x, i, k), inverse));
    const __mmask16 kept = stride - i >= kLanes ? 0xffff : (1 << (stride - i)) - 1;
    _mm512_mask_cvtepi32_storeu_epi8(out + i, kept, _mm512_add_epi32(rounded, zero));
  }
}

// What one product reads and writes; see int8_linear() below.
struct Product {
  const uint8_t* values;
  int64_t stride;
  const float* row_scales;
  const int8_t* panels;
  const int32_t* offsets;
  const float* scales;
  const float* bias;
  int64_t columns;
  float* out;
};

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

// Sums of one row and kLanes columns, scaled back and with the bias.
inline Vector finished(const int32_t* sums, const Product& product, int64_t row, int64_t column) {
  const __m512i offsets = _mm512_loadu_si512(product.offsets + column);
  const __m512i exact = _mm512_sub_epi32(_mm512_load_si512(sums), offsets);
  const Vector steps = reinterpret_cast<Vector>(_mm512_cvtepi32_ps(exact));
  return steps * load(product.scales + column) * splat(product.row_scales[row]) +
         load(product.bias + column);
}

// One tile of the result.  kGated: a panel holds a channel's gate in its first half and what it
// gates in its second.
template <int A, bool kGated, int R>
void tile(const Product& product, int64_t row, int64_t panel, Ahead ahead) {
  constexpr int kWidth = kGated ? kColumns / 2 : kColumns;
  float* out = product.out + row * product.columns + panel * kWidth;
  // Rows of the result lie far apart: let their lines come while the sums are taken.
  for (int r = 0; r < R; ++r) {
    __builtin_prefetch(out + r * product.columns, 1);
    __builtin_prefetch(out + r * product.columns + kLanes, 1);
  }
  const int64_t column = panel * kColumns;
  alignas(64) int32_t sums[R * kColumns];
  multiply<R>(product.values + row * product.stride, product.stride,
              product.panels + column * product.stride, ahead, sums);
  const int64_t width = std::min<int64_t>(kWidth, product.columns - panel * kWidth);
  for (int r = 0; r < R; ++r) {
    const int32_t* place = sums + r * kColumns;
    const Vector first = activated<A>(finished(place, product, row + r, column));
    const Vector second = finished(place + kLanes, product, row + r, column + kLanes);
    float* to = out + r * product.columns;
    alignas(64) float part[kColumns];
    float* whole = width == kWidth ? to : part;
    if constexpr (kGated) {
      store(whole, first * second);
    } else {
      store(whole, first);
      store(whole + kLanes, activated<A>(second));
    }
    if (whole != to) std::memcpy(to, part, width * sizeof(float));
  }
}

using Tile = void (*)(const Product&, int64_t, int64_t, Ahead);

template <int A, bool kGated>
constexpr Tile kTiles[] = {nullptr,
                           tile<A, kGated, 1>,  tile<A, kGated, 2>,  tile<A, kGated, 3>,
                           tile<A, kGated, 4>,  tile<A, kGated, 5>,  tile<A, kGated, 6>,
                           tile<A, kGated, 7>,  tile<A, kGated, 8>,  tile<A, kGated, 9>,
                           tile<A, kGated, 10>, tile<A, kGated, 11>, tile<A, kGated, 12>};

template <bool kGated>
const Tile* tiles_of(int64_t activation) {
  switch (activation) {
    case kGeluTanh: return kTiles<kGeluTanh, kGated>;
    case kGelu: return kTiles<kGelu, kGated>;
    case kRelu: return kTiles<kRelu, kGated>;
    case kSilu: return kTiles<kSilu, kGated>;
    default: return kTiles<kNone, kGated>;
  }
}

}  // namespace
}  // namespace nightjar

using namespace nightjar;

#endif

// Whether this build can multiply bytes: the processor adds four products to an int32 at once.
extern "C" int int8_linear_works() {
#if defined(__AVX512VNNI__)
  return 1;
#else
  return 0;
#endif
}

// out = activation(x @ weight.T + bias).
//
// x: float[rows, k], rows `x_stride` floats apart.  values: uint8[rows, stride] and row_scales:
// float[rows], written here; stride: k rounded up to 4.  panels: int8[panels, stride / 4, 32, 4],
// the weight; offsets: int32, scales, bias: float, each [panels * 32], offsets being 128 times the
// sum of the weight's row.  out: float[rows, columns].  gated: each panel holds 16 columns, their
// gates first: out = activation(gate) * (the product with the other half).
extern "C" void int8_linear(const float* x, int64_t rows, int64_t k, int64_t x_stride,
                            uint8_t* values, float* row_scales, int64_t stride,
                            const int8_t* panels, const int32_t* offsets, const float* scales,
                            const float* bias, int64_t columns, float* out, int64_t activation,
                            int64_t gated) {
#if defined(__AVX512VNNI__)
  const Product product{values, stride, row_scales, panels, offsets, scales, bias, columns, out};
  const Tile* tiles = gated ? tiles_of<true>(activation) : tiles_of<false>(activation);
  const int64_t width = gated ? kColumns / 2 : kColumns;
  const int64_t n_panels = (columns + width - 1) / width;
  // Tiles of nearly equal height; blocks of tiles that stay in the cache over all panels.
  const int64_t n_tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t in_block = std::max<int64_t>(1, kBlockBytes / (stride * kTileRows));
  const int64_t n_blocks = (n_tiles + in_block - 1) / in_block;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      quantize_row(x + row * x_stride, k, stride, values + row * stride, row_scales + row);
    }
    // Neighbouring panels in one hand: the next one is on its way when it is needed.
#pragma omp for collapse(2) schedule(dynamic, 2)
    for (int64_t block = 0; block < n_blocks; ++block) {
      for (int64_t panel = 0; panel < n_panels; ++panel) {
        const int64_t begin = block * in_block, end = std::min(n_tiles, begin + in_block);
        const int8_t* next = panels + (panel + 1) % n_panels * kColumns * stride;
        const int64_t step = kColumns * kBytes / (end - begin);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t first = rows * i / n_tiles, last = rows * (i + 1) / n_tiles;
          const Ahead ahead{next + (i - begin) * step * stride / kBytes, step};
          tiles[last - first](product, first, panel, ahead);
        }
      }
    }
  }
#endif
}
