// Shuffles, votes and __syncwarp: every lane of the mask arrives, then all get their results.
#include "block.h"
#include "scheduler.h"

namespace cuda_host {

namespace {

Finding warp_finding(Kind kind, const void* site) {
  Finding finding(kind, party_of(*running, Action::kAtWarpOperation, site));
  finding.party[0].operation = running->warp_wait.operation;
  finding.party[0].mask = running->warp_wait.mask;
  return finding;
}

Thread& lane_of_warp(uint32_t lane) {
  return block.threads[running->linear - running->lane() + lane];
}

template <class Visit>
void for_lanes(uint32_t mask, Visit visit) {
  for (; mask; mask &= mask - 1) {
    const auto lane = static_cast<uint32_t>(__builtin_ctz(mask));
    visit(lane_of_warp(lane), lane);
  }
}

uint32_t existing_lanes() {
  const uint32_t left =
      static_cast<uint32_t>(block.threads.size()) - running->warp() * kLanes;
  return left >= kLanes ? ~0u : (1u << left) - 1;
}

// Stops the launch when the mask can never be right.
void check_mask(const void* site) {
  const uint32_t mask = running->warp_wait.mask;
  const uint32_t able = existing_lanes() & ~block.warps[running->warp()].returned;
  if (!(mask >> running->lane() & 1u) || (mask & ~able)) {
    stop(warp_finding(Kind::kWarpMask, site));
  }
}

void check_source(const void* site) {
  const WarpWait& wait = running->warp_wait;
  if (wait.operation != CUDA_HOST_WARP_SHUFFLE) return;
  if (wait.source_lane < kLanes && (wait.mask >> wait.source_lane & 1u)) return;
  Finding finding = warp_finding(Kind::kInactiveLane, site);
  finding.offset = wait.source_lane;
  stop(finding);
}

bool all_arrived() {
  const WarpWait& mine = running->warp_wait;
  if (mine.mask & ~block.warps[running->warp()].waiting) return false;
  bool alike = true;
  for_lanes(mine.mask, [&](const Thread& other, uint32_t) {
    alike &= other.warp_wait.operation == mine.operation && other.warp_wait.mask == mine.mask;
  });
  return alike;
}

// What every lane did before happened before whatever any of them does next.
void order_memory(uint32_t mask) {
  std::array<uint32_t, kLanes> known{};
  SharedClock acquired;
  for_lanes(mask, [&](Thread& thread, uint32_t lane) {
    thread.known[lane] = ++thread.time;
    for (uint32_t i = 0; i < kLanes; ++i) known[i] = std::max(known[i], thread.known[i]);
    acquired = merged(acquired, thread.acquired);
  });
  for_lanes(mask, [&](Thread& thread, uint32_t) {
    thread.known = known;
    thread.acquired = acquired;
  });
}

uint64_t lanes_with_value(uint32_t mask, uint64_t value) {
  uint64_t lanes = 0;
  for_lanes(mask, [&](const Thread& other, uint32_t lane) {
    if (other.warp_wait.value == value) lanes |= 1ull << lane;
  });
  return lanes;
}

uint64_t folded(uint32_t mask, CudaHostCombine combine) {
  uint64_t total = lane_of_warp(static_cast<uint32_t>(__builtin_ctz(mask))).warp_wait.value;
  for_lanes(mask & (mask - 1), [&](const Thread& other, uint32_t) {
    total = combine(total, other.warp_wait.value);
  });
  return total;
}

void compute_results() {
  const WarpWait& mine = running->warp_wait;
  uint64_t common = 0;
  if (mine.operation == CUDA_HOST_WARP_BALLOT) common = lanes_with_value(mine.mask, 1);
  if (mine.operation == CUDA_HOST_WARP_REDUCE) common = folded(mine.mask, mine.combine);
  for_lanes(mine.mask, [&](Thread& thread, uint32_t) {
    WarpWait& wait = thread.warp_wait;
    wait.result = common;
    if (wait.operation == CUDA_HOST_WARP_SHUFFLE) {
      wait.result = lane_of_warp(wait.source_lane).warp_wait.value;
    } else if (wait.operation == CUDA_HOST_WARP_MATCH) {
      wait.result = lanes_with_value(wait.mask, wait.value);
    }
  });
}

}  // namespace

}  // namespace cuda_host

extern "C" uint32_t cuda_host_lane() { return cuda_host::running->lane(); }

extern "C" uint64_t cuda_host_warp(CudaHostWarpOperation operation, uint32_t mask, uint64_t value,
                                   uint32_t source_lane, CudaHostCombine combine) {
  using namespace cuda_host;
  Thread* self = running;
  self->site = __builtin_return_address(0);
  self->warp_wait = {operation, mask, source_lane, combine, value, 0};
  check_mask(self->site);
  check_source(self->site);
  self->state = Thread::State::kAtWarpOperation;
  block.warps[self->warp()].waiting |= 1u << self->lane();
  if (all_arrived()) {
    compute_results();
    // Shuffles and votes order no memory (CUDA C++ Programming Guide, warp functions).
    if (operation == CUDA_HOST_WARP_SYNC) order_memory(mask);
    block.warps[self->warp()].waiting &= ~mask;
    for_lanes(mask, [](Thread& thread, uint32_t) { make_runnable(thread); });
  }
  give_way();
  return self->warp_wait.result;
}
