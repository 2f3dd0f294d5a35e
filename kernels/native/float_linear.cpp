// Blocks of the decoder whose weights are FP32; their rows arrive and leave in FP32 or in half
// precision.

#include "float_product.h"

// Whether this build has fused multiply-adds of vectors.
extern "C" int float_linear_works() {
#if defined(__AVX512F__) || defined(__FMA__)
  return 1;
#else
  return 0;
#endif
}

// Output channels of a panel.
extern "C" int64_t float_panel_columns() { return 3 * nightjar::kLanes; }

#if defined(__AVX512F__) || defined(__FMA__)

using namespace nightjar;

namespace {

TiledRows tiled(RoomFor place, int64_t n_rows, const FloatWeight& weight) {
  const int64_t bytes = std::min(n_rows, kRowsAtOnce) * weight.stride * sizeof(float);
  return {static_cast<float*>(room_for(place, bytes)), weight.stride};
}

}  // namespace

// out[n_rows, columns] = activation(x @ weight.T + bias); x: [n_rows, inputs], rows x_stride numbers
// apart.  What out is made of if not floats takes no activation.
extern "C" void float_linear(const void* x, int64_t x_numbers, int64_t x_stride, int64_t n_rows,
                             const FloatWeight* weight, int64_t activation, void* out,
                             int64_t out_numbers) {
  const TiledRows rows = tiled(kRows, n_rows, *weight);
  expect_regions();
  parallel([&](Member& member) {
    in_parts(n_rows, [&](int64_t first, int64_t n) {
      with_rows(x, x_numbers, [&](const auto* x) {
        tile_rows(member, x + first * x_stride, x_stride, n, weight->inputs, rows);
      });
      with_rows(out, out_numbers, [&](auto* out) {
        const PlainRows to{out + first * weight->columns, weight->columns};
        multiply_all(member, *weight, rows, n, activation, to);
      });
    });
  });
}

// The same of norm(residual), to which delta is added first, in place; delta: null for nothing.
extern "C" void float_normed_linear(float* residual, const float* delta, int64_t n_rows,
                                    const Norm* norm, const FloatWeight* weight, void* out,
                                    int64_t out_numbers) {
  const TiledRows rows = tiled(kRows, n_rows, *weight);
  expect_regions();
  parallel([&](Member& member) {
    in_parts(n_rows, [&](int64_t first, int64_t n) {
      tile_normalized(member, Stream(*norm, residual, delta, first), n, rows);
      with_rows(out, out_numbers, [&](auto* out) {
        const PlainRows to{out + first * weight->columns, weight->columns};
        multiply_all(member, *weight, rows, n, kNone, to);
      });
    });
  });
}

// And of a whole feed-forward block: out = activation(norm(residual) @ up) @ down.  The first product
// writes its rows as the second reads them.
extern "C" void float_feed_forward(float* residual, const float* delta, int64_t n_rows,
                                   const Norm* norm, const FloatWeight* up, int64_t activation,
                                   const FloatWeight* down, void* out, int64_t out_numbers) {
  const TiledRows rows = tiled(kRows, n_rows, *up), inner_rows = tiled(kInner, n_rows, *down);
  expect_regions();
  parallel([&](Member& member) {
    in_parts(n_rows, [&](int64_t first, int64_t n) {
      tile_normalized(member, Stream(*norm, residual, delta, first), n, rows);
      multiply_all(member, *up, rows, n, activation, inner_rows);
      with_rows(out, out_numbers, [&](auto* out) {
        const PlainRows to{out + first * down->columns, down->columns};
        multiply_all(member, *down, inner_rows, n, kNone, to);
      });
    });
  });
}

// out[i] = row ids[i] of the weight, whose outputs are a vocabulary, or zeros past the last: float[n,
// inputs].
extern "C" void float_rows(const FloatWeight* weight, const int64_t* ids, int64_t n, float* out) {
  const auto read_row = [=](int64_t i) {
    const int64_t panel = ids[i] / kFloatColumns, column = ids[i] % kFloatColumns;
    const float* from = weight->panels + panel * weight->stride * kFloatColumns + column;
    float* to = out + i * weight->inputs;
    if (ids[i] >= weight->columns) {
      std::fill(to, to + weight->inputs, 0.0f);
      return;
    }
    for (int64_t k = 0; k < weight->inputs; ++k) to[k] = from[k * kFloatColumns];
  };
  parallel([&](Member& member) { member.share(n, read_row); });
}

#endif
