// __syncthreads and its like: every thread of the block arrives, then all go on.
#include "block.h"
#include "scheduler.h"

namespace cuda_host {

namespace {

void check_same_barrier() {
  const Thread& first = block.threads.front();
  for (const Thread& thread : block.threads) {
    if (thread.site == first.site && thread.callers == first.callers) continue;
    // One place in the source may be compiled twice: the driver drops such a pair.
    Finding finding(Kind::kDivergence, party_of(first, Action::kAtBarrier, first.site));
    finding.party[finding.parties++] = party_of(thread, Action::kAtBarrier, thread.site);
    findings.add(finding);
    return;
  }
}

void release() {
  check_same_barrier();
  SharedClock acquired;
  block.barrier_sum = 0;
  for (Thread& thread : block.threads) {
    block.barrier_sum += thread.barrier_value;
    acquired = merged(acquired, thread.acquired);
  }
  for (Thread& thread : block.threads) {
    thread.acquired = acquired;
    make_runnable(thread);
  }
  ++block.epoch;
  block.at_barrier = 0;
}

}  // namespace

}  // namespace cuda_host

extern "C" uint32_t cuda_host_barrier(uint32_t value) {
  using namespace cuda_host;
  running->state = Thread::State::kAtBarrier;
  running->site = __builtin_return_address(0);
  running->barrier_value = value;
  if (++block.at_barrier == block.threads.size()) release();
  give_way();
  return block.barrier_sum;
}
