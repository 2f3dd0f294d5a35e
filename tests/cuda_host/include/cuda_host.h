// CUDA C++ for g++: what a kernel finds without including anything (the driver includes it first).
#pragma once

#include "cuda_host/qualifiers.h"
#include "cuda_host/vector_types.h"
#include "cuda_host/runtime_calls.h"
#include "cuda_host/sync.h"
#include "cuda_host/atomics.h"
#include "cuda_host/math.h"
#include "cuda_host/mma.h"
#include "cuda_host/entry.h"
