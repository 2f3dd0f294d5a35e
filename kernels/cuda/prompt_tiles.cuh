// Paged prompt attention of 16-bit numbers by tensor cores: 16 query rows a warp, 32 keys at a time.
//
// Which channels a sum takes first is free, if both operands take the same.  So an operand of the
// scores comes in wide loads, as it lies: lane 4 r + q has channels 8 q to 8 q + 7, of every 32, of its
// query rows r and r + 8, and of key r of every 8 (mma.cuh).
//
// A warp's weights are the next operand where they are.  Values lie in shared memory as pairs of
// neighbouring positions: lane 4 r + q has channels 4 r to 4 r + 3, of every 32, of pair q of every 4,
// which are column r of 4 products.  Then it holds sums of channels 8 q to 8 q + 7 of its rows.
#pragma once

#include "mma.cuh"
#include "prompt_rows.cuh"

constexpr int TILE_ROWS = 16 * WARPS;  // query rows of a block

// Elements of a line of HEAD_SIZE in shared memory: 8 lanes load 16 bytes at once, from 2 lines of keys
// or 4 of values, and no two from one bank.
template <int HEAD_SIZE>
constexpr int KEY_LINE = HEAD_SIZE + (96 - HEAD_SIZE % 64) % 64;
template <int HEAD_SIZE>
constexpr int VALUE_LINE = HEAD_SIZE + (40 - HEAD_SIZE % 32) % 32;

template <typename T, int HEAD_SIZE>
struct SharedTiles {
  alignas(16) T keys[2][KEYS][KEY_LINE<HEAD_SIZE>];
  alignas(16) unsigned values[2][KEYS / 2][VALUE_LINE<HEAD_SIZE>];
};

// The next keys or values, on their way to registers while the last ones are multiplied: keys first, so
// that both together need no more registers than one of them.
template <typename T, int HEAD_SIZE>
class NextTile {
  static constexpr int PIECES = HEAD_SIZE / WIDE<T>;  // of a line
  static constexpr int OF_KEYS = (KEYS * PIECES + THREADS - 1) / THREADS;
  static constexpr int OF_PAIRS = (KEYS / 2 * PIECES + THREADS - 1) / THREADS;

 public:
  __device__ __forceinline__ void load_keys(const T* from, const Pages& pages, int first) {
#pragma unroll
    for (int j = 0; j < OF_KEYS; ++j) {
      const int piece = threadIdx.x + j * THREADS;
      if (piece < KEYS * PIECES) keys[j] = wide(from, pages, first + piece / PIECES, piece);
    }
  }

  __device__ __forceinline__ void store_keys(T (&to)[KEYS][KEY_LINE<HEAD_SIZE>]) const {
#pragma unroll
    for (int j = 0; j < OF_KEYS; ++j) {
      const int piece = threadIdx.x + j * THREADS;
      if (piece >= KEYS * PIECES) continue;
      reinterpret_cast<uint4&>(to[piece / PIECES][piece % PIECES * WIDE<T>]) = keys[j];
    }
  }

  __device__ __forceinline__ void load_values(const T* from, const Pages& pages, int first) {
#pragma unroll
    for (int j = 0; j < OF_PAIRS; ++j) {
      const int piece = threadIdx.x + j * THREADS, position = first + piece / PIECES * 2;
      if (piece >= KEYS / 2 * PIECES) continue;
      values[j][0] = wide(from, pages, position, piece);
      values[j][1] = wide(from, pages, position + 1, piece);
    }
  }

  __device__ __forceinline__ void store_values(
      unsigned (&to)[KEYS / 2][VALUE_LINE<HEAD_SIZE>]) const {
#pragma unroll
    for (int j = 0; j < OF_PAIRS; ++j) {
      const int piece = threadIdx.x + j * THREADS;
      if (piece >= KEYS / 2 * PIECES) continue;
      const uint4 a = values[j][0], b = values[j][1];
      unsigned* const at = &to[piece / PIECES][piece % PIECES * WIDE<T>];
      reinterpret_cast<uint4*>(at)[0] = {low(a.x, b.x), high(a.x, b.x), low(a.y, b.y),
                                         high(a.y, b.y)};
      reinterpret_cast<uint4*>(at)[1] = {low(a.z, b.z), high(a.z, b.z), low(a.w, b.w),
                                         high(a.w, b.w)};
    }
  }

 private:
  __device__ static uint4 wide(const T* from, const Pages& pages, int position, int piece) {
    const T* const line = from + pages.line(position) * HEAD_SIZE;
    return *reinterpret_cast<const uint4*>(line + piece % PIECES * WIDE<T>);
  }
  __device__ static unsigned low(unsigned a, unsigned b) { return (a & 0xffffu) | (b << 16); }
  __device__ static unsigned high(unsigned a, unsigned b) { return (a >> 16) | (b & 0xffff0000u); }

  uint4 keys[OF_KEYS], values[OF_PAIRS][2];
};

// A warp's 16 query rows, their sums so far, and the softmax of rows r and r + 8 of lane 4 r + q.
template <typename T, int HEAD_SIZE>
class TileRows {
  static constexpr int SPANS = (HEAD_SIZE + 31) / 32;

 public:
  __device__ __forceinline__ TileRows(const QueryRows& rows, int warp, int lane)
      : row(16 * warp + lane / 4), quarter(lane % 4), eighth(lane / 4) {
    limits[0] = rows.limit(row);
    limits[1] = rows.limit(row + 8);
    // Rows ascend in what they see.
    most = rows.has(16 * warp) ? rows.limit(16 * warp + 15) : 0;
  }

  // q: lines of heads, the tokens row_stride apart.
  __device__ __forceinline__ void load(const T* q, int64 row_stride, const QueryRows& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 8 * half;
      const T* const line = q + rows.token(i) * row_stride + rows.head(i) * HEAD_SIZE;
#pragma unroll
      for (int s = 0; s < SPANS; ++s) {
        const int channel = 32 * s + 8 * quarter;
        queries[half][s] = {0, 0, 0, 0};
        if (channel < HEAD_SIZE) {
          queries[half][s] = *reinterpret_cast<const uint4*>(line + channel);
        }
      }
    }
  }

  // Weighs the keys of a tile; first: position of its first one; scale: of scores, times log2(e).
  __device__ __forceinline__ void weigh(const T (&keys)[KEYS][KEY_LINE<HEAD_SIZE>], int first,
                                        float scale) {
    if (first >= most) return;  // the same for the whole warp
    float scores[KEYS / 8][4] = {};
    score(keys, scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      soften(scores, half, first, scale);
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
        const Vector<T, 2> pair = {narrow<T>(scores[n][2 * half]),
                                   narrow<T>(scores[n][2 * half + 1])};
        weights[n / 2][n % 2 * 2 + half] = reinterpret_cast<const unsigned&>(pair);
      }
    }
  }

  // Adds the values of the same tile, with these weights.
  __device__ __forceinline__ void add(const unsigned (&values)[KEYS / 2][VALUE_LINE<HEAD_SIZE>],
                                      int first) {
    if (first >= most) return;
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
      for (int s = 0; s < SPANS; ++s) {
        // Columns past the last channel are never stored.
        const int own = 32 * s + 4 * eighth, channel = own < HEAD_SIZE ? own : 0;
        const auto pair = [&](int i) {
          return reinterpret_cast<const uint4&>(values[8 * k + i][channel]);
        };
        const uint4 near = pair(quarter), far = pair(quarter + 4);
        multiply_tile<T>(sums[s][0], weights[k], {near.x, far.x});
        multiply_tile<T>(sums[s][1], weights[k], {near.y, far.y});
        multiply_tile<T>(sums[s][2], weights[k], {near.z, far.z});
        multiply_tile<T>(sums[s][3], weights[k], {near.w, far.w});
      }
    }
  }

  // out: lines of heads; lse: a number each, or null.
  __device__ __forceinline__ void store(T* out, float* lse, const QueryRows& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 8 * half;
      softmax[half].total = warp_sum<4>(softmax[half].total);
      if (!rows.has(i)) continue;
      // A row that sees nothing is 0.
      const float factor = limits[half] > 0 ? 1.0f / softmax[half].total : 0.0f;
#pragma unroll
      for (int s = 0; s < SPANS; ++s) {
        const int channel = 32 * s + 8 * quarter;
        if (channel >= HEAD_SIZE) continue;
        float whole[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) whole[c] = sums[s][c % 4][2 * half + c / 4] * factor;
        ::store<8>(out + rows.line(i) * HEAD_SIZE + channel, whole);
      }
      if (lse != nullptr && quarter == 0) lse[rows.line(i)] = softmax[half].log_sum_exp();
    }
  }

 private:
  __device__ __forceinline__ void score(const T (&keys)[KEYS][KEY_LINE<HEAD_SIZE>],
                                        float (&scores)[KEYS / 8][4]) const {
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
      const int own = 32 * s + 8 * quarter, channel = own < HEAD_SIZE ? own : 0;
      const uint4 top = queries[0][s], bottom = queries[1][s];
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
        const uint4 key = *reinterpret_cast<const uint4*>(&keys[8 * n + eighth][channel]);
        multiply_tile<T>(scores[n], {top.x, bottom.x, top.y, bottom.y}, {key.x, key.y});
        multiply_tile<T>(scores[n], {top.z, bottom.z, top.w, bottom.w}, {key.z, key.w});
      }
    }
  }

  // Scores of one row become weights, as storage keeps them: so the sum of weights is that of what is
  // multiplied.
  __device__ __forceinline__ void soften(float (&scores)[KEYS / 8][4], int half, int first,
                                         float scale) {
    float next = -infinity();
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[n][2 * half + j];
        const bool sees = first + 8 * n + 2 * quarter + j < limits[half];
        score = sees ? score * scale : -infinity();
        next = fmaxf(next, score);
      }
    }
    const float factor = softmax[half].raise(warp_max<4>(next));
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[n][2 * half + j];
        score = widen(narrow<T>(exp2f(score - softmax[half].highest)));
        softmax[half].total += score;
      }
    }
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[s][i][2 * half] *= factor;
        sums[s][i][2 * half + 1] *= factor;
      }
    }
  }

  const int row, quarter, eighth;
  int most, limits[2];  // positions that the warp's rows see, and each row of this lane
  uint4 queries[2][SPANS];
  unsigned weights[KEYS / 16][4];
  float sums[SPANS][4][4] = {};
  Softmax softmax[2];
};
