// Tensor cores: PTX's mma.m16n8k16, every product of a sum exact, the sum rounded once.
#pragma once

#include "cuda_host/sync.h"

namespace cuda_host {

// Two 16-bit numbers and the two that lie eight inputs further, of a lane.
struct InputsOfLane {
  uint32_t near, far;
};

template <class T>
double dot(InputsOfLane a, InputsOfLane b) {
  const auto product = [](uint32_t x, uint32_t y) {
    return static_cast<double>(float(from_bits<T>(x & 0xffffu))) * float(from_bits<T>(y & 0xffffu));
  };
  return product(a.near, b.near) + product(a.near >> 16, b.near >> 16) + product(a.far, b.far) +
         product(a.far >> 16, b.far >> 16);
}

// A [16, 16] times B [16, 8]: lane 4 r + q holds inputs {2 q, 2 q + 1, 2 q + 8, 2 q + 9} of A's rows
// r and r + 8 and of B's column r, and of the result columns 2 q and 2 q + 1 of both rows.
template <class T>
__forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  constexpr unsigned kWholeWarp = 0xffffffffu;
  const unsigned lane = cuda_host_lane(), row = lane / 4 * 4, column = lane % 4 * 8;
  double sums[4] = {};
  for (unsigned quarter = 0; quarter < 4; ++quarter) {
    InputsOfLane rows[2], columns[2];
    for (unsigned i = 0; i < 2; ++i) {
      rows[i] = shuffle(kWholeWarp, InputsOfLane{a[i], a[i + 2]}, row + quarter);
      columns[i] = shuffle(kWholeWarp, InputsOfLane{b[0], b[1]}, column + 4 * i + quarter);
    }
    for (unsigned i = 0; i < 4; ++i) sums[i] += dot<T>(rows[i / 2], columns[i % 2]);
  }
  for (unsigned i = 0; i < 4; ++i) d[i] = static_cast<float>(d[i] + sums[i]);
}

}  // namespace cuda_host
