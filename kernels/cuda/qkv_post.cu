// Between the QKV projection and attention: bias, norm of queries and keys, rotation, and the keys
// and values into the paged cache.
#include "common.cuh"

constexpr int HEADS_PER_BLOCK = 4;

// One warp a head; a lane holds pairs of neighbouring channels (loads of 4 bytes of half: a head of
// 64 is one whole line).  Channel i turns with channel i + n_turned, which another lane holds, so the
// head passes through shared memory.
//
// qkv [rows, query_heads + 2 * kv_heads, HEAD_SIZE] is changed in place; queries and keys are
// normalised and turned, values are not.  Rows below cached_rows go to the cache
// [blocks, kv_heads, block_size, HEAD_SIZE] unless their block is negative (a place of the batch
// that holds no sequence).  A position outside the table gives NaN.
template <typename T, int HEAD_SIZE>
__global__ void __launch_bounds__(HEADS_PER_BLOCK* WARP)
    qkv_post(T* __restrict__ qkv, const T* __restrict__ bias, const float* __restrict__ query_norm,
             const float* __restrict__ key_norm, float epsilon, const float* __restrict__ cosines,
             const float* __restrict__ sines, const int64* __restrict__ positions,
             int64 n_positions, int n_turned, T* __restrict__ keys, T* __restrict__ values,
             const int64* __restrict__ blocks, const int64* __restrict__ offsets, int64 rows,
             int query_heads, int kv_heads, int64 cached_rows, int block_size) {
  static_assert(HEAD_SIZE % 2 == 0, "lanes hold pairs of channels");
  constexpr int PAIRS = (HEAD_SIZE / 2 + WARP - 1) / WARP;
  __shared__ float turning[HEADS_PER_BLOCK][HEAD_SIZE];

  const int heads = query_heads + 2 * kv_heads;
  const int64 unit = static_cast<int64>(blockIdx.x) * HEADS_PER_BLOCK + threadIdx.y;
  if (unit >= rows * heads) return;
  const int64 row = unit / heads;
  const int head = static_cast<int>(unit % heads);
  const bool is_value = head >= query_heads + kv_heads;
  const bool is_key = head >= query_heads && !is_value;
  T* const place = qkv + unit * HEAD_SIZE;

  float v[PAIRS][2];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int channel = 2 * (j * WARP + static_cast<int>(threadIdx.x));
    v[j][0] = v[j][1] = 0.0f;
    if (channel < HEAD_SIZE) {
      load<2>(place + channel, v[j]);
      if (bias != nullptr) {
        float added[2];
        load<2>(bias + head * HEAD_SIZE + channel, added);
        v[j][0] += added[0];
        v[j][1] += added[1];
      }
    }
  }

  const float* const norm = is_value ? nullptr : is_key ? key_norm : query_norm;
  if (norm != nullptr) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) squares += v[j][0] * v[j][0] + v[j][1] * v[j][1];
    const float inverse = 1.0f / sqrtf(warp_sum(squares) / HEAD_SIZE + epsilon);
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const int channel = 2 * (j * WARP + static_cast<int>(threadIdx.x));
      if (channel < HEAD_SIZE) {
        v[j][0] *= inverse * norm[channel];
        v[j][1] *= inverse * norm[channel + 1];
      }
    }
  }

  if (cosines != nullptr && !is_value) {
    float* const whole = turning[threadIdx.y];
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const int channel = 2 * (j * WARP + static_cast<int>(threadIdx.x));
      if (channel < HEAD_SIZE) {
        whole[channel] = v[j][0];
        whole[channel + 1] = v[j][1];
      }
    }
    __syncwarp();
    const int64 position = positions[row];
    const bool known = position >= 0 && position < n_positions;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = 2 * (j * WARP + static_cast<int>(threadIdx.x)) + i;
        if (channel >= 2 * n_turned) continue;
        const bool first = channel < n_turned;
        const int angle = first ? channel : channel - n_turned;
        const float other = whole[first ? channel + n_turned : angle];
        const float cosine = known ? cosines[position * n_turned + angle] : not_a_number();
        const float sine = known ? sines[position * n_turned + angle] : not_a_number();
        v[j][i] = first ? v[j][i] * cosine - other * sine : v[j][i] * cosine + other * sine;
      }
    }
  }

  T* cached = nullptr;
  if ((is_key || is_value) && row < cached_rows && blocks[row] >= 0) {
    const int kv_head = head - query_heads - (is_value ? kv_heads : 0);
    const int64 line = (blocks[row] * kv_heads + kv_head) * block_size + offsets[row];
    cached = (is_value ? values : keys) + line * HEAD_SIZE;
  }
  const bool changed = bias != nullptr || (!is_value && (norm != nullptr || cosines != nullptr));
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int channel = 2 * (j * WARP + static_cast<int>(threadIdx.x));
    if (channel < HEAD_SIZE) {
      if (changed) store<2>(place + channel, v[j]);
      if (cached != nullptr) store<2>(cached + channel, v[j]);
    }
  }
}
