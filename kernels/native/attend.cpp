// A layer's attention in one region of threads.

#include "attend.h"

using namespace nightjar;

// Whatever is null is not there; scores are multiplied by `scale`.
extern "C" void attend(const CacheLayer* layer, const Projection* projection, const Prompts* prompts,
                       const Running* running, const Documents* documents, float scale) {
  const StepRows rows{projection, prompts, running, documents};
  parallel([&](Member& member) { attend(member, *layer, rows, scale); });
}

// Query rows that a tile can hold.
extern "C" int attention_tile_rows() { return kTileRows; }
