// Activations of whole rows, for products that cannot end in one: bound by reading and writing.

#include "activation.h"
#include "team.h"

namespace nightjar {
namespace {

constexpr int64_t kBlock = 256 * kLanes;  // numbers that a thread takes at a time

template <int A>
void activate(const float* x, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, activated<A>(load(x + i)));
  if (i == n) return;
  alignas(64) float part[kLanes] = {};
  std::memcpy(part, x + i, (n - i) * sizeof(float));
  store(part, activated<A>(load(part)));
  std::memcpy(out + i, part, (n - i) * sizeof(float));
}

using Activate = void (*)(const float*, int64_t, float*);

Activate activate_of(int64_t kind) {
  switch (kind) {
    case kGeluTanh: return activate<kGeluTanh>;
    case kGelu: return activate<kGelu>;
    case kRelu: return activate<kRelu>;
    case kSilu: return activate<kSilu>;
    default: return activate<kNone>;
  }
}

}  // namespace
}  // namespace nightjar

using namespace nightjar;

// out[i] = activation(x[i]), kind: as products.py numbers them.
extern "C" void activation(const float* x, int64_t n, int64_t kind, float* out) {
  const Activate activate = activate_of(kind);
  expect_regions();
  parallel([&](Member& member) {
    member.share((n + kBlock - 1) / kBlock, [&](int64_t i) {
      activate(x + i * kBlock, std::min(kBlock, n - i * kBlock), out + i * kBlock);
    });
  });
}
