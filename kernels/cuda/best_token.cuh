// Passes over the scores of a row; its best score and its token, found by a whole block.
#pragma once

#include "common.cuh"

// Bits that are ordered as the numbers are: -0 equals +0, and NaN is above everything (as torch's
// argmax has it).
__device__ __forceinline__ unsigned ordered_bits(float x) {
  if (x != x) return 0xffffffffu;
  const unsigned bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The number of which these are the ordered bits.
__device__ __forceinline__ float ordered_number(unsigned bits) {
  return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

// Score and token in one number: the largest is the best score at the lowest token.
__device__ __forceinline__ uint64 candidate(float score, int token) {
  return static_cast<uint64>(ordered_bits(score)) << 32 | (0xffffffffu - token);
}

__device__ __forceinline__ int token_of(uint64 candidate) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(candidate));
}

// visit(token, score) of LOADS times 4 neighbours, STEP tokens apart, all of them loaded before.
template <int LOADS, int STEP, typename Visit>
__device__ __forceinline__ void visit_scores(const float* __restrict__ row, int token,
                                             const Visit& visit) {
  float scores[LOADS][WIDE<float>];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) load<WIDE<float>>(row + token + i * STEP, scores[i]);
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
#pragma unroll
    for (int j = 0; j < WIDE<float>; ++j) visit(token + i * STEP + j, scores[i][j]);
  }
}

// visit(token, score) of the tokens [begin, end) of a row, shared out among THREADS threads in no
// order: 4 neighbours a load where addresses allow it, and AHEAD such loads before the first visit.
template <int THREADS, int AHEAD, typename Visit>
__device__ __forceinline__ void each_score(const float* __restrict__ row, int begin, int end,
                                           int thread, const Visit& visit) {
  constexpr int WIDTH = WIDE<float>, STEP = THREADS * WIDTH;
  const int skew = static_cast<int>(reinterpret_cast<uint64>(row + begin) / sizeof(float) % WIDTH);
  const int first = min(begin + (WIDTH - skew) % WIDTH, end);  // of whole loads
  const int last = first + (end - first) / WIDTH * WIDTH;
  if (begin + thread < first) visit(begin + thread, row[begin + thread]);
  if (last + thread < end) visit(last + thread, row[last + thread]);
  int token = first + thread * WIDTH;
  if constexpr (AHEAD > 1) {
#pragma unroll 1
    for (; token + (AHEAD - 1) * STEP < last; token += AHEAD * STEP) {
      visit_scores<AHEAD, STEP>(row, token, visit);
    }
  }
#pragma unroll 1
  for (; token < last; token += STEP) visit_scores<1, STEP>(row, token, visit);
}

// Of each thread of WARPS warps along x: the best candidate of its share of logits [vocab_size]; 0
// where it has none.
template <int WARPS>
__device__ __forceinline__ uint64 own_best(const float* __restrict__ logits, int vocab_size) {
  uint64 best = 0;
  each_score<WARPS * WARP, 4>(
      logits, 0, vocab_size, threadIdx.x,
      [&](int token, float score) { best = max(best, candidate(score, token)); });
  return best;
}

// For every thread of WARPS warps along x: the best of their candidates.
template <int WARPS>
__device__ __forceinline__ uint64 best_of(uint64 best) {
  __shared__ uint64 bests[WARPS];
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
