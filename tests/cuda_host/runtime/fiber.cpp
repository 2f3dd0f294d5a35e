#include "fiber.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifndef __x86_64__
#error "the switch between fibers is written for x86-64"
#endif

// By the System V ABI a function must preserve rbx, rbp, r12 to r15 and the stack pointer. They
// are all that a switch has to keep; swapcontext would also enter the kernel for the signal mask.
asm(R"(
    .text
    .hidden cuda_host_switch
    .globl cuda_host_switch
    .type cuda_host_switch, @function
cuda_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size cuda_host_switch, .-cuda_host_switch
)");

namespace cuda_host {

constexpr size_t kPage = 4096;
constexpr int kSavedRegisters = 6;

char* new_stack() {
  void* mapped = mmap(nullptr, kStackBytes + kPage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED || mprotect(mapped, kPage, PROT_NONE) != 0) abort();
  return static_cast<char*>(mapped) + kPage;
}

void* prepare_stack(char* stack, void (*entry)()) {
  auto* top = reinterpret_cast<uint64_t*>(stack + kStackBytes);
  *--top = 0;  // the return address of `entry`, which does not return; aligned as after a call
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = 0;
  return top;
}

}  // namespace cuda_host
