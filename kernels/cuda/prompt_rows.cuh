// What a block of paged prompt attention computes: query rows of a chunk that share a key head.
#pragma once

#include "fp8.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int KEYS = 32;  // positions whose keys and values are in shared memory together
constexpr float LOG2_E = 1.4426950408889634f;

// Consecutive query rows of a chunk.  Row i is query head i % heads_per_kv of the key head, of the
// chunk's token i / heads_per_kv.  Rows past the last one are the last one again.
struct QueryRows {
  int64 first_token;  // of the chunk, in the step
  int begin, count;   // the first row here; the rows of the chunk
  int seen;           // positions that the chunk's first token sees
  bool causal;        // each later token sees one position more
  int heads_per_kv, kv_head, kv_heads;

  __device__ __forceinline__ int clamped(int i) const { return min(begin + i, count - 1); }

  __device__ __forceinline__ bool has(int i) const { return begin + i < count; }

  // The number of a row among [tokens, heads].
  __device__ __forceinline__ int64 line(int i) const {
    return token(i) * kv_heads * heads_per_kv + head(i);
  }

  __device__ __forceinline__ int64 token(int i) const {
    return first_token + clamped(i) / heads_per_kv;
  }

  __device__ __forceinline__ int head(int i) const {
    return kv_head * heads_per_kv + clamped(i) % heads_per_kv;
  }

  // Positions that a row sees: [0, limit).
  __device__ __forceinline__ int limit(int i) const {
    return causal ? seen + clamped(i) / heads_per_kv : seen;
  }
};

// Where the positions of a sequence lie in either cache, in rows of channels.  table: its cache blocks,
// [blocks, kv_heads, 1 << block_shift].  A position from `end` on is the last one again: what lies
// there may be anything, and 0 times NaN is NaN.
struct Pages {
  const int* table;
  int kv_head, kv_heads, block_shift, end;

  __device__ __forceinline__ int64 line(int position) const {
    const int last = min(position, end - 1), block = table[last >> block_shift];
    return (static_cast<int64>(block * kv_heads + kv_head) << block_shift) +
           (last & ((1 << block_shift) - 1));
  }
};

// Keys and values of one layer of the cache, and in FP8 the exponents of their rows.
template <typename S>
struct Cached {
  const S* keys;
  const S* values;
  const Fp8* key_scales;
  const Fp8* value_scales;
};

// N neighbours of a cached row.  The blocks of other query rows read them too.
template <typename S, int N>
__device__ __forceinline__ Piece<S, N> piece_at(const S* from) {
  Piece<S, N> found;
  found.words = *reinterpret_cast<const decltype(found.words)*>(from);
  return found;
}

// Running maximum and sum of a row's softmax, of exponentials to the base 2.
struct Softmax {
  float highest = -infinity(), total = 0.0f;

  // Takes the maximum of the next scores; returns what earlier sums are multiplied with.
  __device__ __forceinline__ float raise(float next) {
    const float before = highest;
    highest = fmaxf(before, next);
    const float factor = exp2f(before - highest);
    total *= factor;
    return factor;
  }

  __device__ __forceinline__ float log_sum_exp() const {
    return (highest + log2f(total)) / LOG2_E;
  }
};

// The power of two that a row's weights are multiples of, where each is multiplied by its value's factor.
// It follows the largest product: so those that count fit 16 bits, however small or large factors are.
struct WeightUnit {
  float largest = 0.0f;

  // Takes the largest of the next products, and what the softmax multiplies earlier sums with; returns
  // what they are multiplied with in the new unit.
  __device__ __forceinline__ float raise(float earlier, float next) {
    const float before = unit() * earlier;
    largest = fmaxf(largest * earlier, next);
    return before * inverse();
  }

  __device__ __forceinline__ float unit() const { return __int_as_float(exponent() << 23); }
  __device__ __forceinline__ float inverse() const { return __int_as_float((254 - exponent()) << 23); }

 private:
  // So that the unit and its inverse are normal numbers.
  __device__ __forceinline__ int exponent() const {
    return min(max(__float_as_int(largest) >> 23, 1), 253);
  }
};
