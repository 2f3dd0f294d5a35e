#include "scheduler.h"

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <numeric>

#include "fiber.h"
#include "launch.h"

// The kernel's view of them is const.
extern "C" {
uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;
}

namespace cuda_host {

Block block;
Thread* running = nullptr;
Findings findings;

namespace {

// So many accesses in a row without a barrier, a warp operation or an end: somebody spins.
constexpr uint64_t kPatience = 10'000'000;
constexpr uint32_t kQuantum = 20'000;  // accesses after which even seed 0 changes threads

// xorshift64* (Vigna, 2016).
class Random {
 public:
  void seed(uint64_t seed) {
    state_ = seed * 0x9e3779b97f4a7c15ull + 1;  // never 0 for the seeds in use
    draw(1);
  }
  uint32_t draw(uint64_t below) {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<uint32_t>((state_ * 0x2545f4914f6cdd1dull >> 32) * below >> 32);
  }

 private:
  uint64_t state_ = 1;
};

struct Scheduler {
  const Launch* launch = nullptr;
  std::vector<uint32_t> runnable;
  Random random;
  uint32_t mean_quantum = kQuantum;
  uint32_t until_yield = kQuantum;
  uint64_t patience = kPatience;
  void* main_stack_pointer = nullptr;
  bool stopped = false;
} scheduler;

std::vector<char*> stacks;

Thread* choose() {
  auto& runnable = scheduler.runnable;
  if (runnable.empty()) return nullptr;
  const size_t at = scheduler.launch->seed ? scheduler.random.draw(runnable.size()) : 0;
  const uint32_t chosen = runnable[at];
  if (scheduler.launch->seed) {
    runnable[at] = runnable.back();
    runnable.pop_back();
  } else {
    runnable.erase(runnable.begin());  // in turn
  }
  return &block.threads[chosen];
}

void become(Thread* thread) {
  running = thread;
  if (thread) threadIdx = thread->index;
}

void thread_main() {
  scheduler.launch->kernel(scheduler.launch->arguments);
  running->state = Thread::State::kReturned;
  block.warps[running->warp()].returned |= 1u << running->lane();
  ++block.returned;
  scheduler.patience = kPatience;
  give_way();
  abort();  // nobody makes a thread runnable that has returned
}

void begin_block(uint32_t number) {
  const dim3 size = blockDim;
  const uint32_t threads = size.x * size.y * size.z;
  block.number = number;
  block.epoch = block.at_barrier = block.returned = 0;
  block.threads.assign(threads, Thread{});
  block.warps.assign((threads + kLanes - 1) / kLanes, Warp{});
  while (stacks.size() < threads) stacks.push_back(new_stack());
  scheduler.runnable.clear();
  for (uint32_t i = 0; i < threads; ++i) {
    Thread& thread = block.threads[i];
    thread.linear = i;
    thread.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    thread.stack = stacks[i];
    thread.stack_pointer = prepare_stack(stacks[i], thread_main);
    make_runnable(thread);
  }
  blockIdx = {number % gridDim.x, number / gridDim.x % gridDim.y, number / (gridDim.x * gridDim.y)};
  memory.begin_block();
}

Action waiting(const Thread& thread) {
  switch (thread.state) {
    case Thread::State::kAtBarrier: return Action::kAtBarrier;
    case Thread::State::kAtWarpOperation: return Action::kAtWarpOperation;
    case Thread::State::kReturned: return Action::kReturned;
    case Thread::State::kRuns: break;
  }
  return Action::kRuns;
}

bool wait_alike(const Party& a, const Party& b) {
  return a.action == b.action && a.places[0] == b.places[0] && a.operation == b.operation &&
         a.mask == b.mask;
}

// Who waits where: threads that wait alike are one party.
Finding who_waits(Kind kind) {
  Finding finding(kind);
  for (const Thread& thread : block.threads) {
    Party party = party_of(thread, waiting(thread), thread.site);
    if (party.action == Action::kAtWarpOperation) {
      party.operation = thread.warp_wait.operation;
      party.mask = thread.warp_wait.mask;
    }
    if (party.action == Action::kReturned) party.frames = 0, party.places[0] = 0;
    Party* end = finding.party + finding.parties;
    Party* known = std::find_if(finding.party, end,
                                [&](const Party& other) { return wait_alike(other, party); });
    if (known != end) {
      known->last_thread = thread.linear;
      ++known->threads;
    } else if (finding.parties < kParties) {
      finding.party[finding.parties++] = party;
    } else {
      snprintf(finding.text, sizeof finding.text, "threads at more than %d places, of which", kParties);
    }
  }
  return finding;
}

void run_block(uint32_t number) {
  begin_block(number);
  Thread* first = choose();
  become(first);
  cuda_host_switch(&scheduler.main_stack_pointer, first->stack_pointer);
  running = nullptr;
  if (!scheduler.stopped && block.returned < block.threads.size()) {
    findings.add(who_waits(Kind::kDeadlock));
    scheduler.stopped = true;
  }
}

}  // namespace

// Lets a runnable thread go on; without one, the launch's own stack, which sees what is the matter.
void give_way() {
  Thread* self = running;
  Thread* next = choose();
  if (next == self) return;
  become(next);
  cuda_host_switch(&self->stack_pointer,
                   next ? next->stack_pointer : scheduler.main_stack_pointer);
}

Party party_of(const Thread& thread, Action action, const void* place) {
  Party party{};
  party.block = block.number;
  party.first_thread = party.last_thread = thread.linear;
  party.threads = 1;
  party.action = action;
  party.places[party.frames++] = reinterpret_cast<uint64_t>(place);
  for (auto caller = thread.callers.rbegin(); caller != thread.callers.rend(); ++caller) {
    if (party.frames == kFrames) break;
    party.places[party.frames++] = reinterpret_cast<uint64_t>(*caller);
  }
  return party;
}

void stop(const Finding& finding) {
  findings.add(finding);
  scheduler.stopped = true;
  Thread* self = running;
  running = nullptr;
  cuda_host_switch(&self->stack_pointer, scheduler.main_stack_pointer);
  abort();  // a stopped launch never goes on
}

void maybe_yield(const void* place) {
  if (--scheduler.patience == 0) {
    running->site = place;
    stop(who_waits(Kind::kNoProgress));
  }
  if (--scheduler.until_yield) return;
  running->site = place;
  scheduler.until_yield = 1 + scheduler.random.draw(2 * scheduler.mean_quantum);
  scheduler.runnable.push_back(running->linear);
  give_way();
}

void make_runnable(Thread& thread) {
  thread.state = Thread::State::kRuns;
  scheduler.runnable.push_back(thread.linear);
  scheduler.patience = kPatience;
}

void run(const Launch& launch) {
  findings.clear();
  scheduler.launch = &launch;
  scheduler.stopped = false;
  scheduler.patience = kPatience;
  scheduler.random.seed(launch.seed);
  // Some schedules change threads at almost every access, some hardly between barriers.
  constexpr uint32_t kMeans[] = {4, 64, 1024, kQuantum};
  scheduler.mean_quantum = launch.seed ? kMeans[scheduler.random.draw(std::size(kMeans))] : kQuantum;
  scheduler.until_yield = scheduler.mean_quantum;
  gridDim = dim3(launch.grid[0], launch.grid[1], launch.grid[2]);
  blockDim = dim3(launch.block[0], launch.block[1], launch.block[2]);
  memory.begin_launch(launch.regions, launch.region_count);
  std::vector<uint32_t> order(gridDim.x * gridDim.y * gridDim.z);
  std::iota(order.begin(), order.end(), 0u);
  for (size_t left = launch.seed ? order.size() : 0; left > 1; --left) {
    std::swap(order[left - 1], order[scheduler.random.draw(left)]);
  }
  for (uint32_t number : order) {
    run_block(number);
    if (scheduler.stopped) break;
  }
}

}  // namespace cuda_host
