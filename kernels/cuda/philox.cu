// Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC 2011).
#include "common.cuh"

// draws[i] in [0, 1), 53 bits, of key seeds[i] and counter (steps[i], streams[i]).
__global__ void __launch_bounds__(128)
    uniform(const int64* __restrict__ seeds, const int64* __restrict__ streams,
            const int64* __restrict__ steps, double* __restrict__ draws, int64 count) {
  const int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint64 step = steps[i], seed = seeds[i];
  unsigned c0 = static_cast<unsigned>(step), c1 = static_cast<unsigned>(step >> 32);
  unsigned c2 = static_cast<unsigned>(streams[i]), c3 = 0;
  unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const unsigned high2 = __umulhi(0xCD9E8D57u, c2), low2 = 0xCD9E8D57u * c2;
    c0 = high2 ^ c1 ^ k0;
    c1 = low2;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const uint64 bits = (static_cast<uint64>(c0) << 32 | c1) >> 11;
  draws[i] = static_cast<double>(bits) * 0x1p-53;
}
