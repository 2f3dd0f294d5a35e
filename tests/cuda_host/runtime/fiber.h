// Stacks of their own for the threads of a block, and the switch between two of them.
#pragma once

#include <stddef.h>

namespace cuda_host {

constexpr size_t kStackBytes = 128 * 1024;

// A stack with an unmapped page below it; it lives as long as the process.
char* new_stack();

// Prepares a stack so that switching to the result calls `entry`, which must not return.
void* prepare_stack(char* stack, void (*entry)());

// Saves where the caller stands in *from and goes on where `to` was saved.
extern "C" __attribute__((visibility("hidden"))) void cuda_host_switch(void** from, void* to);

}  // namespace cuda_host
