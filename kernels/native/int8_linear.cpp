// Blocks of the decoder whose weights are int8; their rows arrive and leave in FP32 or in half
// precision.

#include "int8_product.h"
#include "layers.h"

// Whether this build can multiply bytes: the processor adds four products to an int32 at once.
extern "C" int int8_linear_works() {
#if defined(__AVX512VNNI__)
  return 1;
#else
  return 0;
#endif
}

#if defined(__AVX512VNNI__)

using namespace nightjar;

// out[n_rows, columns] = activation(x @ weight.T + bias); x: [n_rows, inputs], rows x_stride numbers
// apart.
extern "C" void int8_linear(const void* x, int64_t x_numbers, int64_t x_stride, int64_t n_rows,
                            const Weight* weight, int64_t activation, void* out,
                            int64_t out_numbers) {
  const auto room = room_of<Weight>(n_rows, weight->stride, 0);
  expect_regions();
  parallel([&](Member& member) {
    linear(member, room, {x, x_numbers, x_stride}, n_rows, *weight, activation, {out, out_numbers});
  });
}

// The same of norm(residual), to which delta is added first, in place; delta: null for nothing.
extern "C" void int8_normed_linear(float* residual, const float* delta, int64_t n_rows,
                                   const Norm* norm, const Weight* weight, void* out,
                                   int64_t out_numbers) {
  const auto room = room_of<Weight>(n_rows, weight->stride, 0);
  expect_regions();
  parallel([&](Member& member) {
    normed_linear(member, room, Stream(*norm, residual, delta), n_rows, *weight, {out, out_numbers});
  });
}

// And of a whole feed-forward block: out = activation(norm(residual) @ up) @ down.
extern "C" void int8_feed_forward(float* residual, const float* delta, int64_t n_rows,
                                  const Norm* norm, const Weight* up, int64_t activation,
                                  const Weight* down, void* out, int64_t out_numbers) {
  const auto room = room_of<Weight>(n_rows, std::max(up->stride, down->stride), up->columns);
  expect_regions();
  parallel([&](Member& member) {
    feed_forward(member, room, Stream(*norm, residual, delta), n_rows, *up, activation, *down,
                 {out, out_numbers});
  });
}

// Layers one after another: see layers.h.
extern "C" void int8_layers(const DecoderLayers<Weight>* stack, const DecoderStep* step,
                            const CacheLayer* cache, const Prompts* prompts, const Running* running,
                            const Documents* documents) {
  run_layers(*stack, *step, *cache, {nullptr, prompts, running, documents});
}

#endif
