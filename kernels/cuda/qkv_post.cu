// Between the QKV projection and attention: bias, norm of queries and keys, rotation, and the keys
// and values into the paged cache.
#include "common.cuh"

constexpr int HEADS_PER_BLOCK = 4;

// One warp a head; a lane holds pairs of neighbouring channels (loads of 4 bytes of half: a head of
// 64 is one whole line).  Channel i turns with channel i + n_turned, which another lane holds, so the
// head passes through shared memory.
//
// qkv [rows, query_heads + 2 * kv_heads, HEAD_SIZE] is changed in place; queries and keys are
// normalised and turned, values are not.  units: heads of all rows.  Rows below cached_rows go to the
// cache [blocks, kv_heads, block_size, HEAD_SIZE] unless their block is negative (a place of the batch
// that holds no sequence).  A position outside the table gives NaN.
template <typename T, int HEAD_SIZE>
__global__ void __launch_bounds__(HEADS_PER_BLOCK* WARP)
    qkv_post(T* __restrict__ qkv, const T* __restrict__ bias, const float* __restrict__ query_norm,
             const float* __restrict__ key_norm, float epsilon, const float* __restrict__ cosines,
             const float* __restrict__ sines, const int64* __restrict__ positions,
             int64 n_positions, int n_turned, T* __restrict__ keys, T* __restrict__ values,
             const int64* __restrict__ blocks, const int64* __restrict__ offsets, int units,
             int query_heads, int kv_heads, int cached_rows, int block_size) {
  static_assert(HEAD_SIZE % 2 == 0, "lanes hold pairs of channels");
  constexpr int PAIRS = (HEAD_SIZE / 2 + WARP - 1) / WARP;
  __shared__ float turning[HEADS_PER_BLOCK][HEAD_SIZE];

  const int heads = query_heads + 2 * kv_heads;
  const int unit = blockIdx.x * HEADS_PER_BLOCK + threadIdx.y;
  if (unit >= units) return;
  const int row = unit / heads, head = unit % heads;
  const bool is_value = head >= query_heads + kv_heads;
  const bool is_key = head >= query_heads && !is_value;
  const float* const norm = is_value ? nullptr : is_key ? key_norm : query_norm;
  const bool changed = bias != nullptr || (!is_value && (norm != nullptr || cosines != nullptr));
  const bool is_cached = (is_key || is_value) && row < cached_rows;
  if (!changed && !is_cached) return;
  T* const place = qkv + static_cast<int64>(unit) * HEAD_SIZE;

  // Whatever memory is asked for is asked for first: places, the head, the angles.
  const bool turns = cosines != nullptr && !is_value;
  const int64 block = is_cached ? blocks[row] : -1;
  const int64 offset = is_cached ? offsets[row] : 0;
  const int64 position = turns ? positions[row] : -1;

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

  const bool known = position >= 0 && position < n_positions;
  const int64 line = known ? position * n_turned : 0;
  float cosine[PAIRS][2], sine[PAIRS][2];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = 2 * (j * WARP + static_cast<int>(threadIdx.x)) + i;
      const int angle = channel < n_turned ? channel : channel - n_turned;
      const bool there = known && angle < n_turned;
      cosine[j][i] = there ? (cosines + line)[angle] : not_a_number();
      sine[j][i] = there ? (sines + line)[angle] : not_a_number();
    }
  }

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

  if (turns) {
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
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = 2 * (j * WARP + static_cast<int>(threadIdx.x)) + i;
        if (channel >= 2 * n_turned) continue;
        const bool first = channel < n_turned;
        const float other = whole[first ? channel + n_turned : channel - n_turned];
        const float turned = v[j][i] * cosine[j][i], across = other * sine[j][i];
        v[j][i] = first ? turned - across : turned + across;
      }
    }
  }

  T* cached = nullptr;
  if (block >= 0) {
    const int kv_head = head - query_heads - (is_value ? kv_heads : 0);
    const int64 line = (block * kv_heads + kv_head) * block_size + offset;
    cached = (is_value ? values : keys) + line * HEAD_SIZE;
  }
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const int channel = 2 * (j * WARP + static_cast<int>(threadIdx.x));
    if (channel < HEAD_SIZE) {
      if (changed) store<2>(place + channel, v[j]);
      if (cached != nullptr) store<2>(cached + channel, v[j]);
    }
  }
}
