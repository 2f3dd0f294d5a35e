// A layer's attention: heads are prepared, then every row attends.
#pragma once

#include "branch_attention.h"
#include "decode_attention.h"
#include "prefill_attention.h"
#include "qkv_post.h"

namespace nightjar {

// One layer of the paged cache, as Python hands it over: see attention.py.  keys, values: float, or
// binary16 if `half`: [blocks, kv_heads, block_size, head_size].
struct CacheLayer {
  void* keys;
  void* values;
  int64_t half;
  int64_t kv_heads;
  int64_t block_size;
  int64_t head_size;

  template <typename S>
  Cache<S> of() const {
    return {static_cast<S*>(keys), static_cast<S*>(values), kv_heads, block_size, head_size};
  }
};

// The rows of a step; whatever is null is not there.
struct StepRows {
  const Projection* projection;
  const Prompts* prompts;
  const Running* running;
  const Documents* documents;
};

template <typename S>
void attend_all(Member& member, const Cache<S>& cache, const StepRows& rows, float scale) {
  if (rows.projection != nullptr) prepare(member, *rows.projection, cache);
  if (rows.prompts != nullptr) attend(member, *rows.prompts, cache, scale);
  if (rows.running != nullptr) attend(member, *rows.running, cache, scale);
  if (rows.documents != nullptr) attend(member, *rows.documents, cache, scale);
}

// Scores are multiplied by `scale`.  Called by all members of a region.
inline void attend(Member& member, const CacheLayer& layer, const StepRows& rows, float scale) {
  if (layer.half) {
    attend_all(member, layer.of<Half>(), rows, scale);
  } else {
    attend_all(member, layer.of<float>(), rows, scale);
  }
}

}  // namespace nightjar
