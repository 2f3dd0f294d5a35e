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
  int32_t region = -1;  // index into the regions of the launch; -1: none
  int64_t offset = 0;   // in bytes from the region's beginning
  uint32_t bytes = 0;
  uint32_t parties = 0;
  uint64_t occurrences = 1;
  Party party[kParties] = {};
  char text[128] = {};

  explicit Finding(Kind kind_) : kind(kind_) {}
  Finding(Kind kind_, const Party& who) : Finding(kind_) { party[parties++] = who; }
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
