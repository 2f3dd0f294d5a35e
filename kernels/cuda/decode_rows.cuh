// Scores and weighted values of query heads that share cached rows: each row by the lanes that load it.
#pragma once

#include "common.cuh"

// Lanes that read one cached row together, a wide load each: the next power of two, so that their
// sum is a butterfly (heads of 80 and 96 channels leave 6 and 4 of 16 lanes idle).
template <typename T, int HEAD_SIZE>
__device__ constexpr int row_lanes() {
  int lanes = 1;
  while (lanes * WIDE<T> < HEAD_SIZE) lanes *= 2;
  return lanes;
}

// A wide piece of UNROLL cached rows, loaded before any of them is needed.  There is no branch: loads
// on the two sides of a branch would wait for each other.  For rows from `end` on, the last row is
// read again.  Loads are whole words, because 16-bit numbers would be unpacked too early.  They leave
// the caches first, because most are read once.
template <typename T, int HEAD_SIZE, int UNROLL>
struct Rows {
  uint4 at[UNROLL];

  template <typename Line>
  __device__ void load(const T* from, const Line& line, int first, int step, int end) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int i = min(first + u * step, end - 1);
      at[u] = __ldcs(
          reinterpret_cast<const uint4*>(from + static_cast<int64>(line(i)) * HEAD_SIZE));
    }
  }

  __device__ Vector<T, WIDE<T>> row(int u) const {
    return reinterpret_cast<const Vector<T, WIDE<T>>&>(at[u]);
  }
};

// By the THREADS of a block.  HEAD_SIZE: channels; GROUP: query heads.  SPLIT: positions at most.
template <typename T, int HEAD_SIZE, int GROUP, int THREADS, int SPLIT>
class RowWise {
  static constexpr int LANES = row_lanes<T, HEAD_SIZE>();
  static constexpr int STEP = THREADS / LANES;  // cached rows that the block reads at once
  // More query heads leave fewer registers.
  static constexpr int UNROLL = GROUP == 1 ? 8 : 4;
  static constexpr int BATCH = UNROLL * STEP;
  static_assert(HEAD_SIZE % WIDE<T> == 0 && LANES <= WARP, "a row is whole wide loads of a warp");
  static_assert(SPLIT % BATCH == 0 && SPLIT % WARP == 0, "a split is whole batches");

 public:
  using Query = float;                // what queries are kept as, scaled
  static constexpr int APART = 0;     // numbers between rows of shared memory
  static constexpr bool SCALED = true;

  // thread: of the block; count: positions of the split.
  __device__ __forceinline__ RowWise(int thread, int count)
      : lane(thread % WARP),
        idle(lane % LANES * WIDE<T> >= HEAD_SIZE),
        channel(idle ? 0 : lane % LANES * WIDE<T>),
        mine(thread / LANES),
        count(count) {}

  // Scores: a row's lanes multiply a piece each and add up.  line_at: where a position lies in a cache;
  // scores: a row of positions for each head.
  template <typename Line, typename Queries, typename Scores>
  __device__ __forceinline__ void score(const T* keys, const Line& line_at, const Queries& queries,
                                        float, Scores& scores) {
    float query[GROUP][WIDE<T>];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) load<WIDE<T>>(queries[g][channel / WIDE<T>].at, query[g]);
    for (int step = 0; step < count; step += BATCH) {
      read.load(keys + channel, line_at, step + mine, STEP, count);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        float products[GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
          float sum = 0.0f;
#pragma unroll
          for (int c = 0; c < WIDE<T>; ++c) sum += query[g][c] * widen(read.row(u).at[c]);
          products[g] = idle ? 0.0f : sum;
        }
        const float whole = warp_sums<LANES>(products);
        constexpr int HOLDERS = LANES / GROUP;  // lanes that have the same score
        if (lane % HOLDERS == 0) scores[lane % LANES / HOLDERS][step + u * STEP + mine] = whole;
      }
    }
  }

  // The first values are on their way from here on.
  template <typename Line>
  __device__ __forceinline__ void ask(const T* values, const Line& line_at) {
    read.load(values + channel, line_at, mine, STEP, count);
  }

  // Weighted values: over a thread's rows, over the rows of its warp.  weights: as the scores; sums: of
  // this warp, for each head.
  template <typename Line, typename Weights, typename Sums>
  __device__ __forceinline__ void weigh(const T* values, const Line& line_at, const Weights& weights,
                                        Sums& sums) {
    float sum[GROUP][WIDE<T>];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
      for (int c = 0; c < WIDE<T>; ++c) sum[g][c] = 0.0f;
    }
    for (int step = 0; step < count; step += BATCH) {
      if (step > 0) read.load(values + channel, line_at, step + mine, STEP, count);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
          const float weight = weights[g][step + u * STEP + mine];
#pragma unroll
          for (int c = 0; c < WIDE<T>; ++c) sum[g][c] += weight * widen(read.row(u).at[c]);
        }
      }
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
#pragma unroll
      for (int c = 0; c < WIDE<T>; ++c) {
#pragma unroll
        for (int step = LANES; step < WARP; step *= 2) {
          sum[g][c] += __shfl_xor_sync(WHOLE_WARP, sum[g][c], step);
        }
      }
      if (!idle && lane < LANES) store<WIDE<T>>(sums[g][channel / WIDE<T>].at, sum[g]);
    }
  }

 private:
  Rows<T, HEAD_SIZE, UNROLL> read;
  const int lane;
  const bool idle;
  const int channel;  // idle lanes read what is read anyway
  const int mine;     // row of a step
  const int count;
};
