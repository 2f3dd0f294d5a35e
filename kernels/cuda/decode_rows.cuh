// Scores and weighted values of query heads that share cached rows: each row by the lanes that load it.
#pragma once

#include "fp8.cuh"

// Lanes that read one cached row together, CHANNELS each: the next power of two, so that their sum is a
// butterfly (in 16 bits, heads of 80 and 96 channels leave 6 and 4 of 16 lanes idle).
template <int CHANNELS, int HEAD_SIZE>
__device__ constexpr int row_lanes() {
  int lanes = 1;
  while (lanes * CHANNELS < HEAD_SIZE) lanes *= 2;
  return lanes;
}

// A piece of UNROLL cached rows, loaded before any of them is needed.  There is no branch: loads on the
// two sides of a branch would wait for each other.  For rows from `end` on, the last row is read again.
// Loads are whole words, because narrow numbers would be unpacked too early.
template <typename S, int HEAD_SIZE, int CHANNELS, int UNROLL>
struct Rows {
  Piece<S, CHANNELS> at[UNROLL];
  int exponents[UNROLL];  // in FP8

  template <typename Line>
  __device__ void load(const S* from, const Fp8* scales, const Line& line, int first, int step,
                       int end) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int64 row = line(min(first + u * step, end - 1));
      at[u].load(from + row * HEAD_SIZE);
      if constexpr (IS_FP8<S>) exponents[u] = scales[row];
    }
  }

  __device__ float factor(int u) const {
    if constexpr (IS_FP8<S>) return factor_of(exponents[u]);
    return 1.0f;
  }
};

// By the THREADS of a block.  T: of queries; S: of the cache.  HEAD_SIZE: channels; GROUP: query heads.
// SPLIT: positions at most.
template <typename T, typename S, int HEAD_SIZE, int GROUP, int THREADS, int SPLIT>
class RowWise {
 public:
  // Of a lane: a wide load, in FP8 of several query heads a quarter of it.  Their sums take registers.
  static constexpr int CHANNELS = IS_FP8<S> && GROUP > 1 ? WIDE<S> / 4 : WIDE<S>;

 private:
  static constexpr int LANES = row_lanes<CHANNELS, HEAD_SIZE>();
  static constexpr int STEP = THREADS / LANES;  // cached rows that the block reads at once
  // More query heads leave fewer registers.  So do idle lanes beside the scales of FP8.
  static constexpr int MOST = GROUP > 1 || (IS_FP8<S> && LANES * CHANNELS > HEAD_SIZE) ? 4 : 8;
  static constexpr int UNROLL = MOST * STEP < SPLIT ? MOST : SPLIT / STEP;
  static constexpr int BATCH = UNROLL * STEP;
  static_assert(HEAD_SIZE % CHANNELS == 0 && LANES <= WARP, "a row is whole loads of a warp");
  static_assert(SPLIT % BATCH == 0 && SPLIT % WARP == 0, "a split is whole batches");

 public:
  using Query = float;                // what queries are kept as, scaled
  static constexpr int APART = 0;     // numbers between rows of shared memory
  static constexpr bool SCALED = true;

  // thread: of the block; count: positions of the split.
  __device__ __forceinline__ RowWise(int thread, int count)
      : lane(thread % WARP),
        idle(lane % LANES * CHANNELS >= HEAD_SIZE),
        channel(idle ? 0 : lane % LANES * CHANNELS),
        mine(thread / LANES),
        count(count) {}

  // Scores: a row's lanes multiply a piece each and add up.  scales: of a cache in FP8; line_at: where a
  // position lies in a cache; scores: a row of positions for each head.
  template <typename Line, typename Queries, typename Scores>
  __device__ __forceinline__ void score(const S* keys, const Fp8* scales, const Line& line_at,
                                        const Queries& queries, float, Scores& scores) {
    float query[GROUP][CHANNELS];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) load<CHANNELS>(queries[g][channel / CHANNELS].at, query[g]);
    for (int step = 0; step < count; step += BATCH) {
      read.load(keys + channel, scales, line_at, step + mine, STEP, count);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        float products[GROUP], key[CHANNELS];
        read.at[u].widen_to(key);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
          float sum = 0.0f;
#pragma unroll
          for (int c = 0; c < CHANNELS; ++c) sum += query[g][c] * key[c];
          products[g] = idle ? 0.0f : sum;
        }
        const float whole = warp_sums<LANES>(products) * read.factor(u);
        constexpr int HOLDERS = LANES / GROUP;  // lanes that have the same score
        if (lane % HOLDERS == 0) scores[lane % LANES / HOLDERS][step + u * STEP + mine] = whole;
      }
    }
  }

  // The first values are on their way from here on.
  template <typename Line>
  __device__ __forceinline__ void ask(const S* values, const Fp8* scales, const Line& line_at) {
    read.load(values + channel, scales, line_at, mine, STEP, count);
  }

  // Weighted values: over a thread's rows, over the rows of its warp.  weights: as the scores; sums: of
  // this warp, for each head.
  template <typename Line, typename Weights, typename Sums>
  __device__ __forceinline__ void weigh(const S* values, const Fp8* scales, const Line& line_at,
                                        const Weights& weights, Sums& sums) {
    float sum[GROUP][CHANNELS];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) sum[g][c] = 0.0f;
    }
    for (int step = 0; step < count; step += BATCH) {
      if (step > 0) read.load(values + channel, scales, line_at, step + mine, STEP, count);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        float value[CHANNELS];
        read.at[u].widen_to(value);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
          const float weight = weights[g][step + u * STEP + mine] * read.factor(u);
#pragma unroll
          for (int c = 0; c < CHANNELS; ++c) sum[g][c] += weight * value[c];
        }
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
        for (int step = LANES; step < WARP; step *= 2) {
          sum[g][c] += __shfl_xor_sync(WHOLE_WARP, sum[g][c], step);
        }
      }
      if (!idle && lane < LANES) store<CHANNELS>(sums[g][channel / CHANNELS].at, sum[g]);
    }
  }

 private:
  Rows<S, HEAD_SIZE, CHANNELS, UNROLL> read;
  const int lane;
  const bool idle;
  const int channel;  // idle lanes read what is read anyway
  const int mine;     // row of a step
  const int count;
};
