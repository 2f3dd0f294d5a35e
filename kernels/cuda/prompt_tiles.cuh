// Paged prompt attention of 16-bit numbers by tensor cores: 16 query rows a warp, 32 keys at a time.
//
// Which channels a sum takes first is free, if both operands take the same.  So an operand of the
// scores comes in wide loads, as it lies: lane 4 r + q has channels 8 q to 8 q + 7, of every 32, of its
// query rows r and r + 8, and of key r of every 8 (mma.cuh).
//
// A warp's weights are the next operand where they are.  Values lie in shared memory as pairs of
// neighbouring positions: lane 4 r + q has channels 4 r to 4 r + 3, of every 32, of pair q of every 4,
// which are column r of 4 products.  Then it holds sums of channels 8 q to 8 q + 7 of its rows.
//
// Keys and values in FP8 are widened to T on their way to shared memory, without their rows' factors.  A
// load brings 8 of them, so that what a thread stores is 16 bytes as in 16 bits.  A key's factor is
// multiplied into its scores, a value's into its weights (WeightUnit).
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

// Factors of the keys and values of two tiles.
template <typename S>
struct TileFactors {
  __device__ __forceinline__ float of_key(int, int) const { return 1.0f; }
};
template <>
struct TileFactors<Fp8> {
  float factors[2][2 * KEYS];  // of a tile's keys, then of its values

  __device__ __forceinline__ float of_key(int turn, int i) const { return factors[turn][i]; }
  __device__ __forceinline__ float of_value(int turn, int i) const {
    return factors[turn][KEYS + i];
  }
};

template <typename T, typename S, int HEAD_SIZE>
struct SharedTiles : TileFactors<S> {
  alignas(16) T keys[2][KEYS][KEY_LINE<HEAD_SIZE>];
  alignas(16) unsigned values[2][KEYS / 2][VALUE_LINE<HEAD_SIZE>];
};

// x with as many digits as T has, however small or large it is (Veltkamp's splitting).
template <typename T>
__device__ __forceinline__ float shortened(float x) {
  constexpr int DROPPED = 12 + Widening<T>::SHIFT;  // of FP32's 24 digits: T has 11 or 8
  const float wide = __fmul_rn(x, static_cast<float>((1 << DROPPED) + 1));
  return __fsub_rn(wide, __fsub_rn(wide, x));
}

// The next keys or values, on their way to registers while the last ones are multiplied: keys first, so
// that both together need no more registers than one of them.
template <typename T, typename S, int HEAD_SIZE>
class NextTile {
  static constexpr int OWN = WIDE<T>;              // channels of a piece
  static constexpr int PIECES = HEAD_SIZE / OWN;  // of a line
  static constexpr int OF_KEYS = (KEYS * PIECES + THREADS - 1) / THREADS;
  static constexpr int OF_PAIRS = (KEYS / 2 * PIECES + THREADS - 1) / THREADS;

 public:
  // And the exponents of keys and values, a thread one of them.
  __device__ __forceinline__ void load_keys(const Cached<S>& cached, const Pages& pages, int first) {
#pragma unroll
    for (int j = 0; j < OF_KEYS; ++j) {
      const int piece = threadIdx.x + j * THREADS;
      if (piece < KEYS * PIECES) keys[j] = at(cached.keys, pages, first + piece / PIECES, piece);
    }
    if constexpr (IS_FP8<S>) {
      const int thread = threadIdx.x;
      const Fp8* const scales = thread < KEYS ? cached.key_scales : cached.value_scales;
      if (thread < 2 * KEYS) exponent = scales[pages.line(first + thread % KEYS)];
    }
  }

  __device__ __forceinline__ void store_keys(SharedTiles<T, S, HEAD_SIZE>& to, int turn) const {
#pragma unroll
    for (int j = 0; j < OF_KEYS; ++j) {
      const int piece = threadIdx.x + j * THREADS;
      if (piece >= KEYS * PIECES) continue;
      const auto pair = [&](int p) { return keys[j].template pair<T>(p); };
      reinterpret_cast<uint4&>(to.keys[turn][piece / PIECES][piece % PIECES * OWN]) = {
          pair(0), pair(1), pair(2), pair(3)};
    }
    if constexpr (IS_FP8<S>) {
      if (threadIdx.x < 2 * KEYS) to.factors[turn][threadIdx.x] = factor_of(exponent);
    }
  }

  __device__ __forceinline__ void load_values(const Cached<S>& cached, const Pages& pages,
                                              int first) {
#pragma unroll
    for (int j = 0; j < OF_PAIRS; ++j) {
      const int piece = threadIdx.x + j * THREADS, position = first + piece / PIECES * 2;
      if (piece >= KEYS / 2 * PIECES) continue;
      values[j][0] = at(cached.values, pages, position, piece);
      values[j][1] = at(cached.values, pages, position + 1, piece);
    }
  }

  __device__ __forceinline__ void store_values(SharedTiles<T, S, HEAD_SIZE>& to, int turn) const {
#pragma unroll
    for (int j = 0; j < OF_PAIRS; ++j) {
      const int piece = threadIdx.x + j * THREADS;
      if (piece >= KEYS / 2 * PIECES) continue;
      unsigned* const line = &to.values[turn][piece / PIECES][piece % PIECES * OWN];
#pragma unroll
      for (int p = 0; p < OWN / 2; p += 2) {
        const unsigned a = values[j][0].template pair<T>(p), b = values[j][1].template pair<T>(p);
        const unsigned c = values[j][0].template pair<T>(p + 1);
        const unsigned d = values[j][1].template pair<T>(p + 1);
        reinterpret_cast<uint4&>(line[2 * p]) = {low(a, b), high(a, b), low(c, d), high(c, d)};
      }
    }
  }

 private:
  __device__ static Piece<S, OWN> at(const S* from, const Pages& pages, int position, int piece) {
    const S* const line = from + pages.line(position) * HEAD_SIZE;
    return piece_at<S, OWN>(line + piece % PIECES * OWN);
  }
  __device__ static unsigned low(unsigned a, unsigned b) { return (a & 0xffffu) | (b << 16); }
  __device__ static unsigned high(unsigned a, unsigned b) { return (a >> 16) | (b & 0xffff0000u); }

  Piece<S, OWN> keys[OF_KEYS], values[OF_PAIRS][2];
  int exponent;  // in FP8
};

// A warp's 16 query rows, their sums so far, and the softmax of rows r and r + 8 of lane 4 r + q.
template <typename T, typename S, int HEAD_SIZE>
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
  __device__ __forceinline__ void weigh(const SharedTiles<T, S, HEAD_SIZE>& shared, int turn,
                                        int first, float scale) {
    if (first >= most) return;  // the same for the whole warp
    float scores[KEYS / 8][4] = {};
    score(shared.keys[turn], scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float factor = soften(scores, half, shared, turn, first, scale);
      if constexpr (IS_FP8<S>) factor = scale_weights(scores, half, shared, turn, first, factor);
#pragma unroll
      for (int s = 0; s < SPANS; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[s][i][2 * half] *= factor;
          sums[s][i][2 * half + 1] *= factor;
        }
      }
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
      const float factor = limits[half] > 0 ? unit(half) / softmax[half].total : 0.0f;
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
  __device__ __forceinline__ float unit(int half) const {
    if constexpr (IS_FP8<S>) return units[half].unit();
    return 1.0f;
  }

  __device__ __forceinline__ bool sees(int half, int position) const {
    return position < limits[half];
  }

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
  // multiplied.  In FP8 they keep their size, whatever it is, until they are multiplied by factors.
  // Returns what earlier sums are multiplied with.
  __device__ __forceinline__ float soften(float (&scores)[KEYS / 8][4], int half,
                                          const SharedTiles<T, S, HEAD_SIZE>& shared, int turn,
                                          int first, float scale) {
    float next = -infinity();
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[n][2 * half + j];
        const int i = 8 * n + 2 * quarter + j;
        score = sees(half, first + i) ? score * (scale * shared.of_key(turn, i)) : -infinity();
        next = fmaxf(next, score);
      }
    }
    const float factor = softmax[half].raise(warp_max<4>(next));
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[n][2 * half + j];
        score = exp2f(score - softmax[half].highest);
        score = IS_FP8<S> ? shortened<T>(score) : widen(narrow<T>(score));
        softmax[half].total += score;
      }
    }
    return factor;
  }

  // Weights of one row are multiplied by their values' factors, in the row's unit.  earlier: what the
  // softmax multiplies earlier sums with; returns what they are multiplied with.
  __device__ __forceinline__ float scale_weights(float (&weights)[KEYS / 8][4], int half,
                                                 const SharedTiles<T, S, HEAD_SIZE>& shared,
                                                 int turn, int first, float earlier) {
    float next = 0.0f;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& weight = weights[n][2 * half + j];
        const int i = 8 * n + 2 * quarter + j;
        // A factor that is NaN is nothing to a row that does not see it.
        weight = sees(half, first + i) ? weight * shared.of_value(turn, i) : 0.0f;
        next = fmaxf(next, weight);
      }
    }
    const float factor = units[half].raise(earlier, warp_max<4>(next));
    const float inverse = units[half].inverse();
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
      weights[n][2 * half] *= inverse;
      weights[n][2 * half + 1] *= inverse;
    }
    return factor;
  }

  const int row, quarter, eighth;
  int most, limits[2];  // positions that the warp's rows see, and each row of this lane
  uint4 queries[2][SPANS];
  unsigned weights[KEYS / 16][4];
  float sums[SPANS][4][4] = {};
  Softmax softmax[2];
  WeightUnit units[2];  // in FP8
};
