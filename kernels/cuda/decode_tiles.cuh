// Scores and weighted values of 4 or 8 query heads of 16-bit numbers that share cached rows, by tensor
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
//
// In FP8 (fp8.cuh) a load brings 16 channels, of every 64 and 128 (values of 64 channels: 8 of 64).
// They are widened to T without their rows' factors.  Scores are multiplied by the keys' factors.  The
// weights are multiplied by the values' factors, of which the warp's largest is left to its sums: so no
// weight that counts is too small for 16 bits.
#pragma once

#include "fp8.cuh"
#include "mma.cuh"

constexpr int TILE = 16;  // positions of a product

template <typename T, typename S, int HEAD_SIZE, int OWN>
struct KeyTiles {
  static constexpr int OWN_CHANNELS = WIDE<S>;  // of a lane
  static constexpr int CHUNK = 4 * OWN_CHANNELS, CHUNKS = (HEAD_SIZE + CHUNK - 1) / CHUNK;
  static constexpr int TILES = OWN / TILE;
  static_assert(OWN % TILE == 0, "a warp has whole tiles");
  static_assert(HEAD_SIZE % OWN_CHANNELS == 0, "a lane has all of its channels or none");

  Piece<S, OWN_CHANNELS> at[TILES][2][CHUNKS];
  int exponents[TILES][2];  // in FP8

  // line: where a position of the split lies; first: this warp's first one.  Past `end`, the last one is
  // read again.  Lanes without channels of their own read what is read anyway; their queries are zeros.
  template <typename Line>
  __device__ __forceinline__ void load(const S* keys, const Fp8* scales, const Line& line, int lane,
                                       int first, int end) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64 row = line(min(first + t * TILE + 8 * half + lane / 4, end - 1));
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
          const int channel = CHUNK * c + lane % 4 * OWN_CHANNELS;
          at[t][half][c].load(keys + row * HEAD_SIZE + (channel < HEAD_SIZE ? channel : 0));
        }
        if constexpr (IS_FP8<S>) exponents[t][half] = scales[row];
      }
    }
  }

  // queries: rows of heads; scores: a row of positions for each head.
  template <int GROUP, typename Queries, typename Scores>
  __device__ __forceinline__ void score(const Queries& queries, int lane, int first, float scale,
                                        Scores& scores) const {
    float sum[TILES][4] = {};
    constexpr int PIECES = OWN_CHANNELS / 8;
#pragma unroll
    for (int c = 0; c < CHUNKS * PIECES; ++c) {
      const int piece = (c / PIECES * 4 + lane % 4) * PIECES + c % PIECES;  // of 8 channels
      uint4 query = {0, 0, 0, 0};
      if (8 * piece < HEAD_SIZE) {
        query = reinterpret_cast<const uint4&>(queries[lane / 4 % GROUP][piece]);
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const auto pair = [&](int half, int p) {
          return at[t][half][c / PIECES].template pair<T>(c % PIECES * 4 + p);
        };
        multiply_tile<T>(sum[t], {pair(0, 0), pair(1, 0), pair(0, 1), pair(1, 1)},
                         {query.x, query.y});
        multiply_tile<T>(sum[t], {pair(0, 2), pair(1, 2), pair(0, 3), pair(1, 3)},
                         {query.z, query.w});
      }
    }
    const int head = lane % 4 * 2;
    if (head >= GROUP) return;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const int i = first + t * TILE + lane / 4;
      const float low = scale * factor(t, 0), high = scale * factor(t, 1);
      scores[head][i] = sum[t][0] * low;
      scores[head + 1][i] = sum[t][1] * low;
      scores[head][i + 8] = sum[t][2] * high;
      scores[head + 1][i + 8] = sum[t][3] * high;
    }
  }

  __device__ __forceinline__ float factor(int t, int half) const {
    if constexpr (IS_FP8<S>) return factor_of(exponents[t][half]);
    return 1.0f;
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

template <typename S, int HEAD_SIZE>
struct ValueTile {
  static constexpr int OWN_CHANNELS = HEAD_SIZE > 64 ? WIDE<S> : 8;  // of a lane
  static constexpr int SPAN = 8 * OWN_CHANNELS, SPANS = (HEAD_SIZE + SPAN - 1) / SPAN;

  Piece<S, OWN_CHANNELS> at[4][SPANS];

  // As KeyTiles::load; first: of the tile.
  template <typename Line>
  __device__ __forceinline__ void load(const S* values, const Line& line, int lane, int first,
                                       int end) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = min(first + lane % 4 * 2 + j % 2 + j / 2 * 8, end - 1);
      const S* const row = values + static_cast<int64>(line(i)) * HEAD_SIZE;
#pragma unroll
      for (int s = 0; s < SPANS; ++s) {
        const int channel = SPAN * s + lane / 4 * OWN_CHANNELS;
        at[j][s].load(row + (channel < HEAD_SIZE ? channel : 0));
      }
    }
  }
};

// The factors of a warp's cached rows: the largest, and each row's own, divided by it, in a lane of the
// row.
struct Factors {
  float largest, own;

  __device__ __forceinline__ explicit Factors(int exponent) {
    const int most = static_cast<int>(warp_max(static_cast<unsigned>(exponent)));
    const int relative = exponent - most + 127;
    largest = factor_of(most);
    own = relative > 0 ? __int_as_float(relative << 23) : 0.0f;
  }

  __device__ __forceinline__ float of(int row) const { return __shfl_sync(WHOLE_WARP, own, row); }
};

template <typename T, typename S, int HEAD_SIZE, int GROUP>
struct TileSums {
  using Values = ValueTile<S, HEAD_SIZE>;
  static constexpr int SPANS = Values::SPANS, PAIRS = Values::OWN_CHANNELS / 2;

  float at[SPANS][PAIRS][4] = {};

  // weights: a row of positions for each head.  A weight is multiplied as the two numbers of 16 bits
  // that are nearest to it, so that no more is lost than in FP32 sums.  factor_at: of one of the tile's
  // positions.
  template <typename Weights, typename FactorAt>
  __device__ __forceinline__ void add(const Values& tile, const Weights& weights, int lane, int first,
                                      const FactorAt& factor_at) {
    const int i = lane % 4 * 2;
    const float* const own = &weights[lane / 4 % GROUP][first + i];
    float x = own[0] * factor_at(i), y = own[1] * factor_at(i + 1);
    float z = own[8] * factor_at(i + 8), w = own[9] * factor_at(i + 9);
    const unsigned coarse[2] = {narrow_pair<T>(x, y), narrow_pair<T>(z, w)};
    const unsigned fine[2] = {narrow_pair<T>(x, y), narrow_pair<T>(z, w)};
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        const auto pair = [&](int j) { return tile.at[j][s].template pair<T>(p); };
        const unsigned a = pair(0), b = pair(1), c = pair(2), d = pair(3);
        const unsigned rows[4] = {(a & 0xffffu) | (b << 16), (a >> 16) | (b & 0xffff0000u),
                                  (c & 0xffffu) | (d << 16), (c >> 16) | (d & 0xffff0000u)};
        multiply_tile<T>(at[s][p], rows, coarse);
        multiply_tile<T>(at[s][p], rows, fine);
      }
    }
  }

  // sums: for each head, its channels in pieces of 8.
  template <typename Sums>
  __device__ __forceinline__ void store_to(Sums& sums, int lane, float factor) const {
    const int head = lane % 4 * 2;
    if (head >= GROUP) return;
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
      const int channel = Values::SPAN * s + lane / 4 * Values::OWN_CHANNELS;
      if (channel >= HEAD_SIZE) continue;
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        const int piece = channel / 8 + p / 4, place = 2 * p % 8;
        sums[head][piece].at[place] = at[s][p][0] * factor;
        sums[head + 1][piece].at[place] = at[s][p][1] * factor;
        sums[head][piece].at[place + 1] = at[s][p][2] * factor;
        sums[head + 1][piece].at[place + 1] = at[s][p][3] * factor;
      }
    }
  }
};

// As RowWise.
template <typename T, typename S, int HEAD_SIZE, int GROUP, int THREADS, int SPLIT>
class TileWise {
  static constexpr int OWN = SPLIT / (THREADS / WARP);  // positions of a warp
  static constexpr int TILES = OWN / TILE;
  static_assert(OWN == WARP, "a lane has the factor of one position");

 public:
  static constexpr int CHANNELS = 8;  // of a piece in shared memory
  using Query = T;
  static constexpr int APART = 8;  // so that heads lie in other banks of shared memory
  static constexpr bool SCALED = false;

  __device__ __forceinline__ TileWise(int thread, int count)
      : lane(thread % WARP), first(thread / WARP * OWN), count(count) {}

  template <typename Line, typename Queries, typename Scores>
  __device__ __forceinline__ void score(const S* keys, const Fp8* scales, const Line& line_at,
                                        const Queries& queries, float scale, Scores& scores) {
    if (first >= count) return;
    KeyTiles<T, S, HEAD_SIZE, OWN> tiles;
    tiles.load(keys, scales, line_at, lane, first, count);
    tiles.template score<GROUP>(queries, lane, first, scale, scores);
  }

  template <typename Line>
  __device__ __forceinline__ void ask(const S* values, const Fp8* scales, const Line& line_at) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) tiles[t].load(values, line_at, lane, first + t * TILE, count);
    if constexpr (IS_FP8<S>) exponent = scales[line_at(min(first + lane, count - 1))];
  }

  template <typename Line, typename Weights, typename Sums>
  __device__ __forceinline__ void weigh(const S*, const Fp8*, const Line&, const Weights& weights,
                                        Sums& sums) {
    TileSums<T, S, HEAD_SIZE, GROUP> sum;
    float factor = 1.0f;
    if (first < count) {
      if constexpr (IS_FP8<S>) {
        const Factors factors(exponent);
        factor = factors.largest;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          const auto of_row = [&](int i) { return factors.of(t * TILE + i); };
          sum.add(tiles[t], weights, lane, first + t * TILE, of_row);
        }
      } else {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          sum.add(tiles[t], weights, lane, first + t * TILE, [](int) { return 1.0f; });
        }
      }
    }
    sum.store_to(sums, lane, factor);
  }

 private:
  ValueTile<S, HEAD_SIZE> tiles[TILES];
  int exponent;  // in FP8, of the position first + lane
  const int lane, first, count;
};
