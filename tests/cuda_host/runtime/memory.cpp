#include "memory.h"

#include <string.h>

#include <algorithm>

#include "block.h"
#include "scheduler.h"

namespace cuda_host {

Memory memory;

namespace {

constexpr int kPoison = 0xff;  // a NaN in every floating point format, -1 in integers
constexpr uint32_t kWord = 4;

uint64_t first_word(const Region& region) { return region.address / kWord; }

// Lanes of an earlier access that did not happen before what the running thread does now.
uint32_t unordered_lanes(const Access& earlier) {
  uint32_t lanes = earlier.lanes;
  if (earlier.block == block.number) {
    if (earlier.epoch < block.epoch) return 0;
    if (earlier.warp == running->warp()) {
      lanes &= ~(1u << running->lane());
      for (uint32_t left = lanes; left; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        if (earlier.time < running->known[lane]) lanes &= ~(1u << lane);
      }
    }
  }
  if (lanes && running->acquired) {
    const uint64_t first = static_cast<uint64_t>(earlier.block) * block.threads.size() +
                           earlier.warp * kLanes;
    for (uint32_t left = lanes; left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      if (running->acquired->covers(earlier.block, earlier.epoch, first + lane, earlier.time)) {
        lanes &= ~(1u << lane);
      }
    }
  }
  return lanes;
}

bool may_race(Action a, Action b) {
  return !(a == b && (a == Action::kRead || a == Action::kAtomic));
}

Finding finding_at(Kind kind, int32_t region, int64_t offset, uint32_t bytes) {
  Finding finding(kind);
  finding.region = region;
  finding.offset = offset;
  finding.bytes = bytes;
  return finding;
}

}  // namespace

void Memory::begin_launch(const Region* regions, uint32_t count) {
  shadows_.clear();
  latest_ = nullptr;
  accesses_.assign(1, Access{});  // index 0 means none
  free_ = 0;
  published_.clear();
  for (uint32_t i = 0; i < count; ++i) {
    Shadow shadow{regions[i], static_cast<int32_t>(i), true, {}, {}};
    if (regions[i].bytes && !regions[i].read_only) {
      const uint64_t last = (regions[i].address + regions[i].bytes - 1) / kWord;
      shadow.words.resize(last - first_word(regions[i]) + 1);
      if (regions[i].space == Space::kShared) shadow.written.resize(shadow.words.size());
    }
    shadows_.push_back(std::move(shadow));
  }
}

void Memory::begin_block() {
  for (Shadow& shadow : shadows_) {
    if (shadow.region.space != Space::kShared || !shadow.touched) continue;
    shadow.touched = false;
    memset(reinterpret_cast<void*>(shadow.region.address), kPoison, shadow.region.bytes);
    std::fill(shadow.written.begin(), shadow.written.end(), 0);
    for (uint32_t& first : shadow.words) {
      while (first) forget(first);
    }
  }
}

void Memory::require(uint64_t address, uint32_t bytes, const void* place) {
  if (find(address, bytes)) return;
  refuse(Kind::kOutOfBounds, nearest(address), address, bytes, Action::kRead, place);
}

void Memory::check(uint64_t address, uint32_t bytes, Action action, const void* place) {
  Shadow* shadow = find(address, bytes);
  if (!shadow) refuse(Kind::kOutOfBounds, nearest(address), address, bytes, action, place);
  if (shadow->region.space == Space::kCompiler) return;
  if (shadow->region.read_only) {
    // Reads of what nobody may write cannot race: they need no record.
    if (action != Action::kRead) refuse(Kind::kReadOnly, shadow, address, bytes, action, place);
    return;
  }
  shadow->touched = true;
  const uint64_t end = address + bytes;
  for (uint64_t word = address / kWord; word * kWord < end; ++word) {
    const uint64_t from = std::max(address, word * kWord) - word * kWord;
    const uint64_t to = std::min(end - word * kWord, static_cast<uint64_t>(kWord));
    const auto mask = static_cast<uint8_t>((1u << to) - (1u << from));
    check_word(*shadow, word - first_word(shadow->region), mask, action, place);
  }
}

Memory::Shadow* Memory::find(uint64_t address, uint32_t bytes) {
  const auto holds = [=](const Shadow& shadow) {
    const uint64_t offset = address - shadow.region.address;
    return offset < shadow.region.bytes && bytes <= shadow.region.bytes - offset;
  };
  if (latest_ && holds(*latest_)) return latest_;
  const auto found = std::find_if(shadows_.begin(), shadows_.end(), holds);
  if (found == shadows_.end()) return nullptr;
  return latest_ = &*found;
}

const Memory::Shadow* Memory::nearest(uint64_t address) const {
  const auto distance = [=](const Shadow& shadow) {
    const uint64_t begin = shadow.region.address, end = begin + shadow.region.bytes;
    return address < begin ? begin - address : address < end ? 0 : address - end;
  };
  constexpr uint64_t kStillNear = 1 << 20;
  const Shadow* best = nullptr;
  for (const Shadow& shadow : shadows_) {
    if (distance(shadow) > kStillNear) continue;
    if (!best || distance(shadow) < distance(*best)) best = &shadow;
  }
  return best;
}

void Memory::refuse(Kind kind, const Shadow* shadow, uint64_t address, uint32_t bytes,
                    Action action, const void* place) {
  const uint64_t base = shadow ? shadow->region.address : 0;
  Finding finding = finding_at(kind, shadow ? shadow->number : -1,
                               static_cast<int64_t>(address - base), bytes);
  finding.parties = 1;
  finding.party[0] = party_of(*running, action, place);
  stop(finding);
}

void Memory::check_word(Shadow& shadow, uint64_t word, uint8_t bytes, Action action,
                        const void* place) {
  if (!shadow.written.empty()) check_initialised(shadow, word, bytes, action, place);
  check_races(shadow, word, bytes, action, place);
}

void Memory::check_initialised(Shadow& shadow, uint64_t word, uint8_t bytes, Action action,
                               const void* place) {
  const uint8_t missing = bytes & ~shadow.written[word];
  shadow.written[word] |= bytes;  // a read as well: one report of a place is enough
  if (action == Action::kWrite || !missing) return;
  const int64_t offset = static_cast<int64_t>((first_word(shadow.region) + word) * kWord +
                                              __builtin_ctz(missing) - shadow.region.address);
  Finding finding = finding_at(Kind::kUninitialised, shadow.number, offset,
                               static_cast<uint32_t>(__builtin_popcount(missing)));
  finding.parties = 1;
  finding.party[0] = party_of(*running, action, place);
  findings.add(finding);
}

// Keeps, for each byte, every access that a later one could still race with. A write replaces all
// before it; a read replaces reads that happened before it, and an atomic atomics: whatever would
// race with the replaced access races with its successor too, or did race with it already.
void Memory::check_races(Shadow& shadow, uint64_t word, uint8_t bytes, Action action,
                         const void* place) {
  uint32_t* link = &shadow.words[word];
  uint32_t same = 0;
  while (*link) {
    Access& earlier = accesses_[*link];
    if (earlier.bytes & bytes) {
      const bool conflict = may_race(earlier.action, action);
      const uint32_t lanes =
          conflict || earlier.action == action ? unordered_lanes(earlier) : earlier.lanes;
      if (conflict && lanes) report_race(shadow, word, earlier, lanes, bytes, action, place);
      if (action == Action::kWrite || (earlier.action == action && !lanes)) {
        earlier.bytes &= ~bytes;
        if (!earlier.bytes) {
          forget(*link);
          continue;
        }
      }
      if (earlier.action == action && earlier.place == place && earlier.bytes == bytes &&
          earlier.block == block.number && earlier.epoch == block.epoch &&
          earlier.warp == running->warp() && earlier.time == running->time) {
        same = *link;
      }
    }
    link = &accesses_[*link].next;
  }
  if (same) {
    accesses_[same].lanes |= 1u << running->lane();
  } else {
    shadow.words[word] = remember(bytes, action, place, shadow.words[word]);
  }
}

void Memory::report_race(const Shadow& shadow, uint64_t word, const Access& earlier,
                         uint32_t lanes, uint8_t bytes, Action action, const void* place) const {
  const uint8_t both = earlier.bytes & bytes;
  const int64_t offset = static_cast<int64_t>((first_word(shadow.region) + word) * kWord +
                                              __builtin_ctz(both) - shadow.region.address);
  Finding finding = finding_at(Kind::kRace, shadow.number, offset,
                               static_cast<uint32_t>(__builtin_popcount(both)));
  finding.parties = 2;
  finding.party[0] = party_of(*running, action, place);
  Party& other = finding.party[1];
  other.block = earlier.block;
  other.first_thread = other.last_thread =
      earlier.warp * kLanes + static_cast<uint32_t>(__builtin_ctz(lanes));
  other.threads = 1;
  other.action = earlier.action;
  other.frames = 1;
  other.places[0] = reinterpret_cast<uint64_t>(earlier.place);
  findings.add(finding);
}

uint32_t Memory::remember(uint8_t bytes, Action action, const void* place, uint32_t next) {
  const Access access{place,         block.number, block.epoch, running->warp(),
                      running->time, 1u << running->lane(), bytes, action, next};
  if (!free_) {
    accesses_.push_back(access);
    return static_cast<uint32_t>(accesses_.size() - 1);
  }
  const uint32_t index = free_;
  free_ = accesses_[index].next;
  accesses_[index] = access;
  return index;
}

void Memory::forget(uint32_t& link) {
  const uint32_t index = link;
  link = accesses_[index].next;
  accesses_[index].next = free_;
  free_ = index;
}

void Memory::synchronise(uint64_t address) {
  if (!running->fenced && published_.empty()) return;
  SharedClock& here = published_[address];
  running->pending = merged(running->pending, here);
  here = merged(here, running->fenced);
}

}  // namespace cuda_host
