#include "launch.h"

#include "scheduler.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT uint32_t cuda_host_launch(const cuda_host::Launch* launch) {
  cuda_host::run(*launch);
  return static_cast<uint32_t>(cuda_host::findings.list().size());
}

EXPORT const cuda_host::Finding* cuda_host_finding(uint32_t index) {
  return &cuda_host::findings.list()[index];
}
