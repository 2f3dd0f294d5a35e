// Runs a grid: blocks one after another, the threads of a block by turns.
#pragma once

#include "block.h"
#include "memory.h"

namespace cuda_host {

extern Findings findings;

// A thread of the kernel did something that may be a good moment to let another one run.
void maybe_yield();

// Lets another thread run; the caller goes on once somebody has made it runnable.
void give_way();

// The running thread waits for other lanes of its warp, or they and it may go on.
void wait_for_warp();
void resume_lanes(uint32_t mask);

// Ends the launch from inside a thread of the kernel.
[[noreturn]] void stop(const Finding& finding);

}  // namespace cuda_host
