// Scores and weighted values of 4 or 8 query heads that share cached rows of 16-bit numbers, by tensor
// cores.
//
// Each warp has as many neighbouring positions, and 16 of them are one operand (mma.cuh).  Both
// operands come from memory as they lie, in wide loads that nothing has to put in order: which channels
// a sum takes first is free if both operands take the same, and so is which channel is which row.
//
//   scores [16 positions, 8 heads]: lane 4 r + q loads channels 8 q to 8 q + 7, of every 32, of
//   positions r and r + 8.
//   sums [16 channels, 8 heads]: lane 4 r + q loads channels 8 r to 8 r + 7, of every 64, of positions
//   2 q, 2 q + 1, 2 q + 8, 2 q + 9.  Channels 8 r + 2 p and 8 r + 2 p + 1 are rows r and r + 8 of
//   product p.
//
// Of 4 heads, the operand holds each twice.
#pragma once

#include "mma.cuh"

constexpr int TILE = 16;  // positions of a product

template <typename T, int HEAD_SIZE, int OWN>
struct KeyTiles {
  static constexpr int TILES = OWN / TILE, CHUNKS = (HEAD_SIZE + 31) / 32;
  static_assert(OWN % TILE == 0, "a warp has whole tiles");

  uint4 at[TILES][2][CHUNKS];

  // line: where a position of the split lies; first: this warp's first one.  Past `end`, the last one is
  // read again.  Lanes without channels of their own read what is read anyway; their queries are zeros.
  template <typename Line>
  __device__ __forceinline__ void load(const T* keys, const Line& line, int lane, int first, int end) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = min(first + t * TILE + 8 * half + lane / 4, end - 1);
        const T* const row = keys + static_cast<int64>(line(i)) * HEAD_SIZE;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
          const int channel = 32 * c + lane % 4 * 8;
          at[t][half][c] =
              __ldcs(reinterpret_cast<const uint4*>(row + (channel < HEAD_SIZE ? channel : 0)));
        }
      }
    }
  }

  // queries: rows of heads; scores: a row of positions for each head.
  template <int GROUP, typename Queries, typename Scores>
  __device__ __forceinline__ void score(const Queries& queries, int lane, int first, float scale,
                                        Scores& scores) const {
    float sum[TILES][4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int piece = 4 * c + lane % 4;  // of 8 channels
      uint4 query = {0, 0, 0, 0};
      if (8 * piece < HEAD_SIZE) {
        query = reinterpret_cast<const uint4&>(queries[lane / 4 % GROUP][piece]);
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const uint4 low = at[t][0][c], high = at[t][1][c];
        multiply_tile<T>(sum[t], {low.x, high.x, low.y, high.y}, {query.x, query.y});
        multiply_tile<T>(sum[t], {low.z, high.z, low.w, high.w}, {query.z, query.w});
      }
    }
    const int head = lane % 4 * 2;
    if (head >= GROUP) return;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const int i = first + t * TILE + lane / 4;
      scores[head][i] = sum[t][0] * scale;
      scores[head + 1][i] = sum[t][1] * scale;
      scores[head][i + 8] = sum[t][2] * scale;
      scores[head + 1][i + 8] = sum[t][3] * scale;
    }
  }
};

// Two numbers as storage keeps them, and what that leaves of each.
template <typename T>
__device__ __forceinline__ unsigned narrow_pair(float& x, float& y) {
  const Vector<T, 2> pair = {narrow<T>(x), narrow<T>(y)};
  x -= widen(pair.at[0]);
  y -= widen(pair.at[1]);
  return reinterpret_cast<const unsigned&>(pair);
}

template <typename T, int HEAD_SIZE>
struct ValueTile {
  static constexpr int SPANS = (HEAD_SIZE + 63) / 64;

  uint4 at[4][SPANS];

  // As KeyTiles::load; first: of the tile.
  template <typename Line>
  __device__ __forceinline__ void load(const T* values, const Line& line, int lane, int first,
                                       int end) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = min(first + lane % 4 * 2 + j % 2 + j / 2 * 8, end - 1);
      const T* const row = values + static_cast<int64>(line(i)) * HEAD_SIZE;
#pragma unroll
      for (int s = 0; s < SPANS; ++s) {
        const int channel = 64 * s + lane / 4 * 8;
        at[j][s] = __ldcs(reinterpret_cast<const uint4*>(row + (channel < HEAD_SIZE ? channel : 0)));
      }
    }
  }

  __device__ __forceinline__ unsigned word(int j, int s, int p) const {
    const uint4 raw = at[j][s];
    return p == 0 ? raw.x : p == 1 ? raw.y : p == 2 ? raw.z : raw.w;
  }
};

template <typename T, int HEAD_SIZE, int GROUP>
struct TileSums {
  static constexpr int SPANS = ValueTile<T, HEAD_SIZE>::SPANS;

  float at[SPANS][4][4] = {};

  // weights: a row of positions for each head.  A weight is multiplied as the two numbers of 16 bits
  // that are nearest to it, so that no more is lost than in FP32 sums.
  template <typename Weights>
  __device__ __forceinline__ void add(const ValueTile<T, HEAD_SIZE>& tile, const Weights& weights,
                                      int lane, int first) {
    const float* const own = &weights[lane / 4 % GROUP][first + lane % 4 * 2];
    float x = own[0], y = own[1], z = own[8], w = own[9];
    const unsigned coarse[2] = {narrow_pair<T>(x, y), narrow_pair<T>(z, w)};
    const unsigned fine[2] = {narrow_pair<T>(x, y), narrow_pair<T>(z, w)};
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const unsigned a = tile.word(0, s, p), b = tile.word(1, s, p);
        const unsigned c = tile.word(2, s, p), d = tile.word(3, s, p);
        const unsigned rows[4] = {(a & 0xffffu) | (b << 16), (a >> 16) | (b & 0xffff0000u),
                                  (c & 0xffffu) | (d << 16), (c >> 16) | (d & 0xffff0000u)};
        multiply_tile<T>(at[s][p], rows, coarse);
        multiply_tile<T>(at[s][p], rows, fine);
      }
    }
  }

  // sums: for each head, its channels in pieces of 8.
  template <typename Sums>
  __device__ __forceinline__ void store_to(Sums& sums, int lane) const {
    const int head = lane % 4 * 2;
    if (head >= GROUP) return;
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
      const int piece = 8 * s + lane / 4;
      if (8 * piece >= HEAD_SIZE) continue;
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        sums[head][piece].at[2 * p] = at[s][p][0];
        sums[head + 1][piece].at[2 * p] = at[s][p][1];
        sums[head][piece].at[2 * p + 1] = at[s][p][2];
        sums[head + 1][piece].at[2 * p + 1] = at[s][p][3];
      }
    }
  }
};

// As RowWise.
template <typename T, int HEAD_SIZE, int GROUP, int THREADS, int SPLIT>
class TileWise {
  static constexpr int OWN = SPLIT / (THREADS / WARP);  // positions of a warp
  static constexpr int TILES = OWN / TILE;

 public:
  using Query = T;
  static constexpr int APART = 8;  // so that heads lie in other banks of shared memory
  static constexpr bool SCALED = false;

  __device__ __forceinline__ TileWise(int thread, int count)
      : lane(thread % WARP), first(thread / WARP * OWN), count(count) {}

  template <typename Line, typename Queries, typename Scores>
  __device__ __forceinline__ void score(const T* keys, const Line& line_at, const Queries& queries,
                                        float scale, Scores& scores) {
    if (first >= count) return;
    KeyTiles<T, HEAD_SIZE, OWN> tiles;
    tiles.load(keys, line_at, lane, first, count);
    tiles.template score<GROUP>(queries, lane, first, scale, scores);
  }

  template <typename Line>
  __device__ __forceinline__ void ask(const T* values, const Line& line_at) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) tiles[t].load(values, line_at, lane, first + t * TILE, count);
  }

  template <typename Line, typename Weights, typename Sums>
  __device__ __forceinline__ void weigh(const T*, const Line&, const Weights& weights, Sums& sums) {
    TileSums<T, HEAD_SIZE, GROUP> sum;
    if (first < count) {
#pragma unroll
      for (int t = 0; t < TILES; ++t) sum.add(tiles[t], weights, lane, first + t * TILE);
    }
    sum.store_to(sums, lane);
  }

 private:
  ValueTile<T, HEAD_SIZE> tiles[TILES];
  const int lane, first, count;
};
