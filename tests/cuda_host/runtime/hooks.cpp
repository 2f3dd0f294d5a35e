// What the compiler calls at every load and store of a kernel (-fsanitize=thread), before a wrong
// array index or a misaligned address is used (-fsanitize=bounds-strict,alignment), and what
// atomics.h and sync.h call. The sanitizers' own libraries are not linked.
#include <stdio.h>
#include <string.h>

#include "block.h"
#include "fiber.h"
#include "memory.h"
#include "scheduler.h"

namespace cuda_host {

namespace {

bool on_own_stack(uint64_t address) {
  return address - reinterpret_cast<uint64_t>(running->stack) < kStackBytes;
}

__attribute__((always_inline)) inline void access(const void* pointer, size_t bytes, Action action,
                                                  const void* place) {
  const auto address = reinterpret_cast<uint64_t>(pointer);
  if (!running || on_own_stack(address)) return;
  maybe_yield(place);
  memory.check(address, static_cast<uint32_t>(bytes), action, place);
}

[[noreturn]] void stop_at(Kind kind, Action action, const void* place, const char* text) {
  Finding finding(kind, party_of(*running, action, place));
  snprintf(finding.text, sizeof finding.text, "%s", text);
  stop(finding);
}

}  // namespace

}  // namespace cuda_host

using cuda_host::access;
using cuda_host::Action;
using cuda_host::Kind;
using cuda_host::running;

extern "C" {

#define PLACE __builtin_return_address(0)
#define HOOKS(bytes)                                                                              \
  void __tsan_read##bytes(void* p) { access(p, bytes, Action::kRead, PLACE); }                    \
  void __tsan_write##bytes(void* p) { access(p, bytes, Action::kWrite, PLACE); }                  \
  void __tsan_unaligned_read##bytes(void* p) { access(p, bytes, Action::kRead, PLACE); }          \
  void __tsan_unaligned_write##bytes(void* p) { access(p, bytes, Action::kWrite, PLACE); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t bytes) { access(p, bytes, Action::kRead, PLACE); }
void __tsan_write_range(void* p, size_t bytes) { access(p, bytes, Action::kWrite, PLACE); }
void __tsan_init() {}
void __tsan_func_entry(void* caller) {
  if (running) running->callers.push_back(caller);
}
void __tsan_func_exit() {
  if (running && !running->callers.empty()) running->callers.pop_back();
}

// Layouts of GCC's libsanitizer (ubsan_value.h, ubsan_handlers.h).
struct UbsanType {
  uint16_t kind;
  uint16_t info;
  char name[1];
};
struct UbsanPlace {
  const char* file;
  uint32_t line;
  uint32_t column;
};
struct UbsanOutOfBounds {
  UbsanPlace place;
  const UbsanType* array;
  const UbsanType* index;
};
struct UbsanTypeMismatch {
  UbsanPlace place;
  const UbsanType* type;
  uint8_t log2_alignment;
  uint8_t check;
};

void __ubsan_handle_out_of_bounds(const UbsanOutOfBounds* data, uint64_t index) {
  if (!running) return;
  char text[96];
  snprintf(text, sizeof text, "index %lld of an array %s", static_cast<long long>(index),
           data->array->name);
  cuda_host::stop_at(Kind::kOutOfBounds, Action::kRuns, PLACE, text);
}

void __ubsan_handle_type_mismatch_v1(const UbsanTypeMismatch* data, uint64_t address) {
  if (!running) return;
  char text[96];
  snprintf(text, sizeof text, "%s at an address that is %llu past a multiple of %u",
           data->type->name,
           static_cast<unsigned long long>(address & ((1ull << data->log2_alignment) - 1)),
           1u << data->log2_alignment);
  cuda_host::stop_at(Kind::kMisaligned, Action::kRuns, PLACE, text);
}

void cuda_host_atomic(const void* address, size_t bytes, const void* site) {
  if (reinterpret_cast<uint64_t>(address) % bytes) {
    cuda_host::stop_at(Kind::kMisaligned, Action::kAtomic, site, "an atomic, misaligned");
  }
  access(address, bytes, Action::kAtomic, site);
  cuda_host::memory.synchronise(reinterpret_cast<uint64_t>(address));
}

// Accesses so far may be published by a later atomic, and what earlier atomics read is acquired.
void cuda_host_fence() {
  using namespace cuda_host;
  Thread& self = *running;
  self.acquired = merged(self.acquired, self.pending);
  auto snapshot = self.acquired ? std::make_shared<Clock>(*self.acquired)
                                : std::make_shared<Clock>();
  snapshot->learn_block(block.number, block.epoch);
  self.known[self.lane()] = ++self.time;
  const uint64_t warp = block.global_number(self.linear - self.lane());
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    if (self.known[lane]) snapshot->learn_thread(warp + lane, self.known[lane]);
  }
  self.fenced = std::move(snapshot);
}

// Reads nothing, so it races with nobody.
void cuda_host_prefetch(const void* address, size_t bytes, const void* site) {
  const auto from = reinterpret_cast<uint64_t>(address);
  if (from % 16 || bytes % 16) {
    cuda_host::stop_at(Kind::kMisaligned, Action::kRead, site,
                       "a prefetch of or at no multiple of 16 bytes");
  }
  cuda_host::memory.require(from, static_cast<uint32_t>(bytes), site);
}

void cuda_host_trap(const char* text) {
  cuda_host::stop_at(Kind::kTrap, Action::kRuns, PLACE, text);
}

}  // extern "C"
