// Blocks of the decoder whose weights are FP32; their rows arrive and leave in FP32 or in half
// precision.

#include "float_product.h"
#include "layers.h"

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

// out[n_rows, columns] = activation(x @ weight.T + bias); x: [n_rows, inputs], rows x_stride numbers
// apart.
extern "C" void float_linear(const void* x, int64_t x_numbers, int64_t x_stride, int64_t n_rows,
                             const FloatWeight* weight, int64_t activation, void* out,
                             int64_t out_numbers) {
  const auto room = room_of<FloatWeight>(n_rows, weight->stride, 0);
  expect_regions();
  parallel([&](Member& member) {
    linear(member, room, {x, x_numbers, x_stride}, n_rows, *weight, activation, {out, out_numbers});
  });
}

// The same of norm(residual), to which delta is added first, in place; delta: null for nothing.
extern "C" void float_normed_linear(float* residual, const float* delta, int64_t n_rows,
                                    const Norm* norm, const FloatWeight* weight, void* out,
                                    int64_t out_numbers) {
  const auto room = room_of<FloatWeight>(n_rows, weight->stride, 0);
  expect_regions();
  parallel([&](Member& member) {
    normed_linear(member, room, Stream(*norm, residual, delta), n_rows, *weight, {out, out_numbers});
  });
}

// And of a whole feed-forward block: out = activation(norm(residual) @ up) @ down.
extern "C" void float_feed_forward(float* residual, const float* delta, int64_t n_rows,
                                   const Norm* norm, const FloatWeight* up, int64_t activation,
                                   const FloatWeight* down, void* out, int64_t out_numbers) {
  const auto room = room_of<FloatWeight>(n_rows, std::max(up->stride, down->stride), up->columns);
  expect_regions();
  parallel([&](Member& member) {
    feed_forward(member, room, Stream(*norm, residual, delta), n_rows, *up, activation, *down,
                 {out, out_numbers});
  });
}

// Layers one after another: see layers.h.
extern "C" void float_layers(const DecoderLayers<FloatWeight>* stack, const DecoderStep* step,
                             const CacheLayer* cache, const Prompts* prompts,
                             const Running* running, const Documents* documents) {
  run_layers(*stack, *step, *cache, {nullptr, prompts, running, documents});
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
