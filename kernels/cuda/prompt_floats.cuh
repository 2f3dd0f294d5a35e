// Paged prompt attention of FP32 numbers: 8 query rows a warp, 32 keys at a time, a lane a key.
//
// The sums of values are a lane's own 4 channels.  Keys and then values take the same shared memory, so
// that a block needs less than 48 KB.  Of a cache in FP8 the codes are widened on their way there.  A lane
// multiplies its key's factor into the scores, and its value's into the weights, which is exact.
#pragma once

#include "prompt_rows.cuh"

constexpr int OWN_ROWS = 8;  // of a warp
constexpr int FLOAT_ROWS = OWN_ROWS * WARPS;

template <int HEAD_SIZE>
struct SharedFloats {
  alignas(16) float queries[FLOAT_ROWS][HEAD_SIZE];
  alignas(16) float cached[KEYS][HEAD_SIZE + 4];  // so that 8 lanes' keys lie in other banks
  alignas(16) float weights[FLOAT_ROWS][KEYS];
};

__device__ __forceinline__ float4 four(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

template <typename S, int HEAD_SIZE>
class FloatRows {
  static constexpr int PIECES = HEAD_SIZE / 4;  // of a line

 public:
  __device__ __forceinline__ FloatRows(SharedFloats<HEAD_SIZE>& shared, int warp, int lane)
      : shared(shared), first_row(OWN_ROWS * warp), lane(lane) {}

  __device__ __forceinline__ void load(const float* q, int64 row_stride, const QueryRows& rows) {
    for (int piece = threadIdx.x; piece < FLOAT_ROWS * PIECES; piece += THREADS) {
      const int i = piece / PIECES, channel = piece % PIECES * 4;
      const float* const line = q + rows.token(i) * row_stride + rows.head(i) * HEAD_SIZE;
      *reinterpret_cast<float4*>(&shared.queries[i][channel]) = four(line + channel);
    }
#pragma unroll
    for (int r = 0; r < OWN_ROWS; ++r) limits[r] = rows.limit(first_row + r);
  }

  // Adds the next keys and values; by the whole block.
  __device__ __forceinline__ void add(const Cached<S>& cached, const Pages& pages, int first,
                                      float scale) {
    __syncthreads();  // the values before are read
    fetch(cached.keys, pages, first);
    const float of_key = factor(cached.key_scales, pages, first);
    const float of_value = factor(cached.value_scales, pages, first);
    __syncthreads();
    weigh(first, scale * of_key, of_value);
    __syncthreads();  // the keys are read
    fetch(cached.values, pages, first);
    __syncthreads();
    if (lane < PIECES) sum();
  }

  __device__ __forceinline__ void store(float* out, float* lse, const QueryRows& rows) const {
#pragma unroll
    for (int r = 0; r < OWN_ROWS; ++r) {
      const int i = first_row + r;
      if (!rows.has(i)) continue;
      const float factor = limits[r] > 0 ? 1.0f / softmax[r].total : 0.0f;  // seeing nothing gives 0
      float whole[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) whole[c] = sums[r][c] * factor;
      if (lane < PIECES) ::store<4>(out + rows.line(i) * HEAD_SIZE + 4 * lane, whole);
      if (lse != nullptr && lane == 0) lse[rows.line(i)] = softmax[r].log_sum_exp();
    }
  }

 private:
  __device__ __forceinline__ void fetch(const S* from, const Pages& pages, int first) {
    for (int piece = threadIdx.x; piece < KEYS * PIECES; piece += THREADS) {
      const int i = piece / PIECES, channel = piece % PIECES * 4;
      const S* const line = from + pages.line(first + i) * HEAD_SIZE;
      float whole[4];
      piece_at<S, 4>(line + channel).widen_to(whole);
      ::store<4>(&shared.cached[i][channel], whole);
    }
  }

  // Of this lane's position.
  __device__ __forceinline__ float factor(const Fp8* scales, const Pages& pages, int first) const {
    if constexpr (IS_FP8<S>) return factor_of(scales[pages.line(first + lane)]);
    return 1.0f;
  }

  // The weight of this lane's key in each row, and what it leaves of earlier sums.  scale: of its scores;
  // of_value: the factor of its value.
  __device__ __forceinline__ void weigh(int first, float scale, float of_value) {
    float scores[OWN_ROWS] = {};
    for (int channel = 0; channel < HEAD_SIZE; channel += 4) {
      const float4 key = four(&shared.cached[lane][channel]);
#pragma unroll
      for (int r = 0; r < OWN_ROWS; ++r) {
        const float4 query = four(&shared.queries[first_row + r][channel]);
        scores[r] += query.x * key.x + query.y * key.y + query.z * key.z + query.w * key.w;
      }
    }
#pragma unroll
    for (int r = 0; r < OWN_ROWS; ++r) {
      const bool sees = first + lane < limits[r];
      const float score = sees ? scores[r] * scale : -infinity();
      const float factor = softmax[r].raise(warp_max(score));
      const float weight = exp2f(score - softmax[r].highest);
      softmax[r].total += warp_sum(weight);
      // A factor that is NaN is nothing to a row that does not see it.
      shared.weights[first_row + r][lane] = sees ? weight * of_value : 0.0f;
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[r][c] *= factor;
    }
  }

  __device__ __forceinline__ void sum() {
    for (int key = 0; key < KEYS; key += 4) {
      float4 value[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) value[k] = four(&shared.cached[key + k][4 * lane]);
#pragma unroll
      for (int r = 0; r < OWN_ROWS; ++r) {
        const float4 weight = four(&shared.weights[first_row + r][key]);
        const float of_keys[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sums[r][0] += of_keys[k] * value[k].x;
          sums[r][1] += of_keys[k] * value[k].y;
          sums[r][2] += of_keys[k] * value[k].z;
          sums[r][3] += of_keys[k] * value[k].w;
        }
      }
    }
  }

  SharedFloats<HEAD_SIZE>& shared;
  const int first_row, lane;
  int limits[OWN_ROWS];
  float sums[OWN_ROWS][4] = {};
  Softmax softmax[OWN_ROWS];
};
