// What was found wrong. The layout is read by the driver (findings.py): change both.
#pragma once

#include <stdint.h>

#include <vector>

namespace cuda_host {

enum class Kind : uint32_t {
  kRace,
  kOutOfBounds,
  kMisaligned,
  kUninitialised,
  kReadOnly,
  kDivergence,
  kDeadlock,
  kWarpMask,
  kInactiveLane,
  kTrap,
  kNoProgress,
};

// What a thread did, or where it waits.
enum class Action : uint32_t {
  kRead,
  kWrite,
  kAtomic,
  kAtBarrier,
  kAtWarpOperation,  // Party::operation tells which
  kReturned,
  kRuns,
};

constexpr int kFrames = 8;
constexpr int kParties = 8;

// A thread of a block, or several that do the same.
struct Party {
  uint32_t block;
  uint32_t first_thread;
  uint32_t last_thread;
  uint32_t threads;
  Action action;
  uint32_t operation;
  uint32_t mask;
  uint32_t frames;
  uint64_t places[kFrames];  // return addresses, innermost first
};

struct Finding {
  Kind kind;
  int32_t region;  // index into the regions of the launch; -1: none
  int64_t offset;  // in bytes from the region's beginning
  uint32_t bytes;
  uint32_t parties;
  uint64_t occurrences;
  Party party[kParties];
  char text[128];
};

// Collects findings; the same one at the same places is counted, not repeated.
class Findings {
 public:
  void clear() { list_.clear(); }
  void add(const Finding& finding);
  const std::vector<Finding>& list() const { return list_; }

 private:
  std::vector<Finding> list_;
};

}  // namespace cuda_host
