// A layer's attention in one region of threads: heads are prepared, then every row attends.

#include "branch_attention.h"
#include "decode_attention.h"
#include "prefill_attention.h"
#include "qkv_post.h"

namespace nightjar {
namespace {

// One layer of the paged cache, as Python hands it over: see attention.py.  keys, values: float, or
// binary16 if `half`: [blocks, kv_heads, block_size, head_size].
struct Layer {
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

template <typename S>
void attend_all(const Cache<S>& cache, const Projection* projection, const Prompts* prompts,
                const Running* running, const Documents* documents, float scale) {
  parallel([&](Member& member) {
    if (projection != nullptr) prepare(member, *projection, cache);
    if (prompts != nullptr) attend(member, *prompts, cache, scale);
    if (running != nullptr) attend(member, *running, cache, scale);
    if (documents != nullptr) attend(member, *documents, cache, scale);
  });
}

}  // namespace
}  // namespace nightjar

using namespace nightjar;

// Whatever is null is not there; scores are multiplied by `scale`.
extern "C" void attend(const Layer* layer, const Projection* projection, const Prompts* prompts,
                       const Running* running, const Documents* documents, float scale) {
  if (layer->half) {
    attend_all(layer->of<Half>(), projection, prompts, running, documents, scale);
  } else {
    attend_all(layer->of<float>(), projection, prompts, running, documents, scale);
  }
}

// Query rows that a tile can hold.
extern "C" int attention_tile_rows() { return kTileRows; }
