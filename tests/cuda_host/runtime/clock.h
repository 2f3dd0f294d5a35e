// What happened before what, over warps and blocks: knowledge passed on by fences and atomics.
// (Inside a warp Thread::known, inside a block its barriers are enough.)
#pragma once

#include <stdint.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

namespace cuda_host {

// A vector clock, written sparsely. It covers an access when the access happened before whatever
// its owner does next.
class Clock {
 public:
  void learn_block(uint32_t block, uint32_t epoch) { raise(blocks_, block, epoch); }
  void learn_thread(uint64_t thread, uint32_t time) { raise(threads_, thread, time); }
  void learn(const Clock& other) {
    for (const auto& [block, epoch] : other.blocks_) learn_block(block, epoch);
    for (const auto& [thread, time] : other.threads_) learn_thread(thread, time);
  }
  bool covers(uint32_t block, uint32_t epoch, uint64_t thread, uint32_t time) const {
    const auto known_block = blocks_.find(block);
    if (known_block != blocks_.end() && epoch < known_block->second) return true;
    const auto known_thread = threads_.find(thread);
    return known_thread != threads_.end() && time < known_thread->second;
  }

 private:
  template <class Map, class Key>
  static void raise(Map& map, Key key, uint32_t value) {
    uint32_t& held = map[key];
    held = std::max(held, value);
  }

  std::unordered_map<uint32_t, uint32_t> blocks_;   // barriers of the block that are known
  std::unordered_map<uint64_t, uint32_t> threads_;  // the thread's own time that is known
};

using SharedClock = std::shared_ptr<const Clock>;

// Both together; either may be null, which knows nothing.
inline SharedClock merged(const SharedClock& a, const SharedClock& b) {
  if (!a || a == b) return b;
  if (!b) return a;
  auto both = std::make_shared<Clock>(*a);
  both->learn(*b);
  return both;
}

}  // namespace cuda_host
