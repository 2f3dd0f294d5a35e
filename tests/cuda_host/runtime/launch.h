// The driver's side of the runtime (module.py): start a launch, read what was found.
#pragma once

#include <stdint.h>

#include "memory.h"

namespace cuda_host {

// The layout is written by the driver (module.py): change both.
struct Launch {
  void (*kernel)(void* const*);
  void* const* arguments;
  uint32_t grid[3];
  uint32_t block[3];
  uint64_t seed;  // 0: threads and blocks in order
  const Region* regions;
  uint32_t region_count;
};

void run(const Launch& launch);

}  // namespace cuda_host
