// Products of FP32 rows with int8 weights: quantised, multiplied, scaled back and sent through the
// activation in one pass over the data.
//
// A weight row (an output channel) and an activation row each have one scale; the sums are exact
// int32, so a row's result does not depend on the other rows.  See reference/int8_linear.py.

#include "common.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

namespace nightjar {
namespace {

enum Activation { kNone = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kSilu = 4 };

constexpr int kColumns = 32;      // of a panel: two registers of int32
constexpr int kTileRows = 12;     // 12 x 2 accumulators leave room in 32 registers for the operands
constexpr int kBytes = 4;         // products that one instruction adds up in a lane
constexpr int kZero = 128;        // activations are stored unsigned: value + kZero
constexpr float kLimit = 127.0f;  // largest absolute value of a quantised activation
constexpr float kLeastPeak = 1e-30f;       // a row of zeros needs some scale
constexpr int64_t kBlockBytes = 1 << 18;  // activations that stay in a core's cache

// Hendrycks and Gimpel, arXiv 1606.08415: x * sigmoid(2 u) is 0.5 * x * (1 + tanh(u)).
inline float gelu_tanh(float x) {
  constexpr float slope = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
  const float u = x * __builtin_fmaf(x * x, slope * 0.044715f, slope);
  return x / (1.0f + exponential(-u));
}

inline float silu(float x) { return x / (1.0f + exponential(-x)); }

// 0.5 * x * erfc(-x / sqrt(2)); erfc by the Chebyshev fit of Numerical Recipes (erfcc, relative
// error below 1.2e-7).
inline float gelu(float x) {
  const float z = std::fabs(x) * 0.70710678118654752f;
  const float t = 1.0f / __builtin_fmaf(0.5f, z, 1.0f);
  float p = __builtin_fmaf(t, 0.17087277f, -0.82215223f);
  p = __builtin_fmaf(t, p, 1.48851587f);
  p = __builtin_fmaf(t, p, -1.13520398f);
  p = __builtin_fmaf(t, p, 0.27886807f);
  p = __builtin_fmaf(t, p, -0.18628806f);
  p = __builtin_fmaf(t, p, 0.09678418f);
  p = __builtin_fmaf(t, p, 0.37409196f);
  p = __builtin_fmaf(t, p, 1.00002368f);
  p = __builtin_fmaf(t, p, -1.26551223f);
  const float tail = 0.5f * x * t * exponential(__builtin_fmaf(-z, z, p));
  return x < 0.0f ? tail : x - tail;
}

template <int A>
inline float activated(float x) {
  if constexpr (A == kGeluTanh) return gelu_tanh(x);
  if constexpr (A == kGelu) return gelu(x);
  if constexpr (A == kRelu) return x < 0.0f ? 0.0f : x;
  if constexpr (A == kSilu) return silu(x);
  return x;
}

// Scales a row by its largest absolute value onto -kLimit..kLimit.
//
// The peak is taken over the numbers' bits, where NaN is larger than infinity: a row that is not
// finite gets a scale, and so a result, that is not finite.
void quantize_row(const float* x, int64_t k, int64_t stride, uint8_t* out, float* scale) {
  int32_t top = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < k; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  float peak;
  std::memcpy(&peak, &top, sizeof(peak));
  peak = peak < kLeastPeak ? kLeastPeak : peak;
  *scale = peak / kLimit;
  const float inverse = kLimit / peak;
#pragma omp simd
  for (int64_t i = 0; i < k; ++i) {
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(__builtin_rintf(x[i] * inverse)) + kZero);
  }
  for (int64_t i = k; i < stride; ++i) out[i] = 0;
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

#if defined(__AVX512VNNI__)

// What to fetch while a tile is computed: its share of the next panel, `step` bytes at a time.
struct Ahead {
  const int8_t* from;
  int64_t step;
};

// The int32 sums of R rows and the columns of one panel.
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
      const __m512i row = _mm512_set1_epi32(word);
      // Written out, as GCC 12 keeps the accumulators of the intrinsic in memory.
      asm("vpdpbusd %2, %1, %0" : "+v"(low[r]) : "v"(row), "v"(first));
      asm("vpdpbusd %2, %1, %0" : "+v"(high[r]) : "v"(row), "v"(second));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_si512(sums + r * kColumns, low[r]);
    _mm512_storeu_si512(sums + r * kColumns + 16, high[r]);
  }
}

// One tile of the result.  kGated: a panel holds a channel's gate in its first half and what it
// gates in its second.
template <int A, bool kGated, int R>
void tile(const Product& product, int64_t row, int64_t panel, Ahead ahead) {
  constexpr int kWidth = kGated ? kColumns / 2 : kColumns;
  const int64_t column = panel * kColumns;
  const int64_t width = std::min<int64_t>(kWidth, product.columns - panel * kWidth);
  alignas(64) int32_t sums[R * kColumns];
  multiply<R>(product.values + row * product.stride, product.stride,
              product.panels + column * product.stride, ahead, sums);
  for (int r = 0; r < R; ++r) {
    alignas(64) float results[kColumns];
    const float row_scale = product.row_scales[row + r];
#pragma omp simd
    for (int c = 0; c < kColumns; ++c) {
      const float sum = static_cast<float>(sums[r * kColumns + c] - product.offsets[column + c]);
      const float y = sum * product.scales[column + c] * row_scale + product.bias[column + c];
      results[c] = kGated && c >= kWidth ? y : activated<A>(y);
    }
    if constexpr (kGated) {
#pragma omp simd
      for (int c = 0; c < kWidth; ++c) results[c] *= results[kWidth + c];
    }
    float* out = product.out + (row + r) * product.columns + panel * kWidth;
    std::memcpy(out, results, width * sizeof(float));
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

#endif

}  // namespace
}  // namespace nightjar

using namespace nightjar;

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
