// Blocks of the decoder as Python calls them, for weights W of any kind; their rows arrive and leave in
// FP32 or in half precision.
#pragma once

#include "layers.h"

namespace nightjar {

// out[n_rows, columns] = activation(x @ weight.T + bias), with what adapters add to a place of `layer`.
template <typename W>
void run_linear(const RowsIn& x, int64_t n_rows, const W& weight, int64_t activation,
                const RowsOut& out, const AdaptedRows* adapted, int64_t layer) {
  const LowRankStep low_rank(adapted);
  const Added added = low_rank.at(layer, kAttentionOut);
  const auto room = room_of<W>(n_rows, weight.stride, 0);
  expect_regions();
  parallel([&](Member& member) { linear(member, room, x, n_rows, weight, activation, out, added); });
}

// The same of norm(stream).
template <typename W>
void run_normed_linear(const Stream& stream, int64_t n_rows, const W& weight, const RowsOut& out,
                       const AdaptedRows* adapted, int64_t layer) {
  const LowRankStep low_rank(adapted);
  const Added added = low_rank.at(layer, kQueryKeyValue);
  const auto room = room_of<W>(n_rows, weight.stride, 0);
  expect_regions();
  parallel([&](Member& member) { normed_linear(member, room, stream, n_rows, weight, out, added); });
}

// And of a whole feed-forward block: out = activation(norm(stream) @ up) @ down.
template <typename W>
void run_feed_forward(const Stream& stream, int64_t n_rows, const W& up, int64_t activation,
                      const W& down, const RowsOut& out, const AdaptedRows* adapted,
                      int64_t layer) {
  const LowRankStep low_rank(adapted);
  const Added to_up = low_rank.at(layer, kUp), to_down = low_rank.at(layer, kDown);
  const auto room = room_of<W>(n_rows, std::max(up.stride, down.stride), up.columns);
  expect_regions();
  parallel([&](Member& member) {
    feed_forward(member, room, stream, n_rows, up, activation, down, out, to_up, to_down);
  });
}

}  // namespace nightjar

// The functions that products.py and layers.py call for weights W by the names KIND_...
//
// x: [n_rows, inputs], rows x_stride numbers apart; delta: added to the residual stream first, in place,
// or null; ..._numbers: product.h's Numbers; adapted: the rows with adapters, or null, whose products
// are those of `layer`.
#define NIGHTJAR_BLOCKS(KIND, W)                                                                    \
  extern "C" void KIND##_linear(const void* x, int64_t x_numbers, int64_t x_stride, int64_t n_rows, \
                                const W* weight, int64_t activation, void* out,                     \
                                int64_t out_numbers, const nightjar::AdaptedRows* adapted,          \
                                int64_t layer) {                                                    \
    nightjar::run_linear<W>({x, x_numbers, x_stride}, n_rows, *weight, activation,                  \
                            {out, out_numbers}, adapted, layer);                                    \
  }                                                                                                 \
  extern "C" void KIND##_normed_linear(float* residual, const float* delta, int64_t n_rows,         \
                                       const nightjar::Norm* norm, const W* weight, void* out,      \
                                       int64_t out_numbers, const nightjar::AdaptedRows* adapted,   \
                                       int64_t layer) {                                             \
    nightjar::run_normed_linear<W>({*norm, residual, delta}, n_rows, *weight, {out, out_numbers},   \
                                   adapted, layer);                                                 \
  }                                                                                                 \
  extern "C" void KIND##_feed_forward(float* residual, const float* delta, int64_t n_rows,          \
                                      const nightjar::Norm* norm, const W* up, int64_t activation,  \
                                      const W* down, void* out, int64_t out_numbers,                \
                                      const nightjar::AdaptedRows* adapted, int64_t layer) {        \
    nightjar::run_feed_forward<W>({*norm, residual, delta}, n_rows, *up, activation, *down,         \
                                  {out, out_numbers}, adapted, layer);                              \
  }                                                                                                 \
  extern "C" void KIND##_layers(                                                                    \
      const nightjar::DecoderLayers<W>* stack, const nightjar::DecoderStep* step,                   \
      const nightjar::CacheLayer* cache, const nightjar::Prompts* prompts,                          \
      const nightjar::Running* running, const nightjar::Documents* documents,                       \
      const nightjar::AdaptedRows* adapted) {                                                       \
    nightjar::run_layers(*stack, *step, *cache, {nullptr, prompts, running, documents}, adapted);   \
  }
