// The best score of a row and its token, found by a whole block.
#pragma once

#include "common.cuh"

// Bits that are ordered as the numbers are: -0 equals +0, and NaN is above everything (as torch's
// argmax has it).
__device__ __forceinline__ unsigned ordered_bits(float x) {
  if (x != x) return 0xffffffffu;
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Score and token in one number: the largest is the best score at the lowest token.
__device__ __forceinline__ uint64 candidate(float score, int token) {
  return static_cast<uint64>(ordered_bits(score)) << 32 | (0xffffffffu - token);
}

__device__ __forceinline__ int token_of(uint64 candidate) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(candidate));
}

// For every thread of WARPS warps along x: the best candidate of logits [vocab_size].
template <int WARPS>
__device__ __forceinline__ uint64 best_token(const float* __restrict__ logits, int vocab_size) {
  __shared__ uint64 bests[WARPS];
  uint64 best = 0;
#pragma unroll 4
  for (int token = threadIdx.x; token < vocab_size; token += WARPS * WARP) {
    best = max(best, candidate(logits[token], token));
  }
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    best = max(best, __shfl_xor_sync(WHOLE_WARP, best, step));
  }
  __syncthreads();
  if (threadIdx.x % WARP == 0) bests[threadIdx.x / WARP] = best;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) best = max(best, bests[warp]);
  return best;
}
