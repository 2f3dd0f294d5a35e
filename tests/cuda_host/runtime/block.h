// The block that runs: its threads, their states, and which of them runs now.
#pragma once

#include <stdint.h>

#include <array>
#include <vector>

#include "clock.h"
#include "cuda_host/runtime_calls.h"
#include "findings.h"

namespace cuda_host {

constexpr uint32_t kLanes = 32;

struct WarpWait {
  CudaHostWarpOperation operation;
  uint32_t mask;
  uint32_t source_lane;
  CudaHostCombine combine;
  uint64_t value;
  uint64_t result;
};

struct Thread {
  enum class State : uint8_t { kRuns, kAtBarrier, kAtWarpOperation, kReturned };

  State state = State::kRuns;
  uint32_t linear = 0;
  uint3 index{};
  char* stack = nullptr;
  void* stack_pointer = nullptr;
  const void* site = nullptr;             // where it waits
  std::vector<const void*> callers;       // return addresses, outermost first
  uint32_t barrier_value = 0;
  WarpWait warp_wait{};

  // Happens-before: its own time rises when it synchronises with others; accesses of lane j of its
  // warp before time known[j] happened before what it does next.
  uint32_t time = 0;
  std::array<uint32_t, kLanes> known{};
  SharedClock acquired;  // of other warps and blocks
  SharedClock pending;   // read by atomics; acquired by the next fence
  SharedClock fenced;    // what its atomics publish: what it knew at its last fence

  uint32_t lane() const { return linear % kLanes; }
  uint32_t warp() const { return linear / kLanes; }
};

// Lanes of one warp, a bit each.
struct Warp {
  uint32_t waiting = 0;  // in a warp operation
  uint32_t returned = 0;
};

struct Block {
  uint32_t number = 0;  // in the grid, linear
  uint32_t epoch = 0;   // barriers passed
  uint32_t at_barrier = 0;
  uint32_t returned = 0;
  uint32_t barrier_sum = 0;  // of the last barrier's values
  std::vector<Thread> threads;
  std::vector<Warp> warps;

  uint64_t global_number(uint32_t thread) const {
    return static_cast<uint64_t>(number) * threads.size() + thread;
  }
};

extern Block block;
extern Thread* running;  // null while no thread of a kernel runs

// A party that is `thread` at `place`, with its callers.
Party party_of(const Thread& thread, Action action, const void* place);

}  // namespace cuda_host
