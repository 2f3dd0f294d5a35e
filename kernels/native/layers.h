// Layers of a decoder one after another, in one region of threads.
//
// Between two calls from Python a core finds neither the interpreter nor its objects in its caches:
// a layer of four calls waits longer for those than it computes when few rows are in the step.
#pragma once

#include "attend.h"
#include "low_rank.h"

namespace nightjar {

// One layer, as Python hands it over: see layers.py.  W: how its weights lie.  query_norm, key_norm: as
// in Projection.  Scores are multiplied by `scale`.
template <typename W>
struct DecoderLayer {
  Norm attention_norm;
  const W* qkv;
  Norm query_norm;
  Norm key_norm;
  float scale;
  const W* attention_out;
  Norm mlp_norm;
  const W* up;
  const W* down;
};

// `count` layers, whose parts of the cache lie cache_bytes apart.
template <typename W>
struct DecoderLayers {
  const DecoderLayer<W>* layers;
  int64_t count;
  int64_t activation;
  int64_t cache_bytes;
};

// What a step of those is computed in: the residual stream float[rows, H]; `projection` without the
// norms of a layer; attended: [rows, heads, head_size], in the cache's numbers, where the attention
// in `rows` writes.
struct DecoderStep {
  float* residual;
  const Projection* projection;
  void* attended;
};

// Every layer adds its attention and then its feed-forward block to the stream.  adapted: null for no
// adapters.
template <typename W>
void run_layers(const DecoderLayers<W>& stack, const DecoderStep& step, const CacheLayer& first,
                StepRows rows, const AdaptedRows* adapted) {
  const int64_t n_rows = step.projection->rows;
  const int64_t attended_size = step.projection->heads * first.head_size;
  int64_t stride = 0, inner = 0;
  for (int64_t i = 0; i < stack.count; ++i) {
    const DecoderLayer<W>& layer = stack.layers[i];
    for (const W* weight : {layer.qkv, layer.attention_out, layer.up, layer.down}) {
      stride = std::max(stride, weight->stride);
    }
    inner = std::max(inner, layer.up->columns);
  }
  const auto room = room_of<W>(n_rows, stride, inner);
  const LowRankStep low_rank(adapted);
  const int64_t numbers = first.half ? kHalves : kFloats;
  expect_regions();
  parallel([&](Member& member) {
    for (int64_t i = 0; i < stack.count; ++i) {
      const DecoderLayer<W>& layer = stack.layers[i];
      CacheLayer cache = first;
      cache.keys = static_cast<char*>(first.keys) + i * stack.cache_bytes;
      cache.values = static_cast<char*>(first.values) + i * stack.cache_bytes;
      Projection projection = *step.projection;
      projection.query_norm = layer.query_norm;
      projection.key_norm = layer.key_norm;
      StepRows attending = rows;
      attending.projection = &projection;
      normed_linear(member, room, Stream(layer.attention_norm, step.residual, nullptr), n_rows,
                    *layer.qkv, {projection.qkv, numbers}, low_rank.at(i, kQueryKeyValue));
      attend(member, cache, attending, layer.scale);
      linear(member, room, {step.attended, numbers, attended_size}, n_rows, *layer.attention_out,
             kNone, {step.residual, kAddends}, low_rank.at(i, kAttentionOut));
      feed_forward(member, room, Stream(layer.mlp_norm, step.residual, nullptr), n_rows, *layer.up,
                   stack.activation, *layer.down, {step.residual, kAddends}, low_rank.at(i, kUp),
                   low_rank.at(i, kDown));
    }
  });
}

}  // namespace nightjar
