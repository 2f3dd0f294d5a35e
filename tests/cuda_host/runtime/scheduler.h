// Runs a grid: blocks one after another, the threads of a block by turns.
#pragma once

#include "block.h"
#include "memory.h"

namespace cuda_host {

extern Findings findings;

// The running thread is about to do something at `place`: another one may run first.
void maybe_yield(const void* place);

// Lets another thread run; the caller goes on once somebody has made it runnable.
void give_way();

// A thread that waited may go on.
void make_runnable(Thread& thread);

// Ends the launch from inside a thread of the kernel.
[[noreturn]] void stop(const Finding& finding);

}  // namespace cuda_host
