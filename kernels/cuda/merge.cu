// One attention from partial ones: the splits of decode attention, or two sets of keys.
#include "common.cuh"

constexpr int ROWS = 4;  // of a block: a warp each

// The splits of each (sequence, head), in ascending order of position: out [batch, heads,
// HEAD_SIZE]; lse [batch, heads] or null.  parts and stats are what decode_attention wrote; splits
// from the sequence's end on were not written and are not read.
template <typename T, int HEAD_SIZE, int SPLIT>
__global__ void __launch_bounds__(ROWS* WARP)
    merge_splits(const float* __restrict__ parts, const float* __restrict__ stats,
                 const int* __restrict__ lengths, T* __restrict__ out, float* __restrict__ lse,
                 int64 rows, int heads, int max_splits) {
  constexpr int CHANNELS = (HEAD_SIZE + WARP - 1) / WARP;
  const int64 row = static_cast<int64>(blockIdx.x) * ROWS + threadIdx.y;
  if (row >= rows) return;
  const int lane = threadIdx.x;
  const int splits = min(max_splits, (lengths[row / heads] + SPLIT - 1) / SPLIT);
  parts += row * max_splits * HEAD_SIZE;
  stats += row * max_splits * 2;

  float highest = -infinity();
  for (int i = lane; i < splits; i += WARP) highest = fmaxf(highest, stats[2 * i]);
  highest = warp_max(highest);
  float total = 0.0f, sum[CHANNELS];
#pragma unroll
  for (int j = 0; j < CHANNELS; ++j) sum[j] = 0.0f;
#pragma unroll 4
  for (int i = 0; i < splits; ++i) {
    const float weight = expf(stats[2 * i] - highest);
    total += weight * stats[2 * i + 1];
#pragma unroll
    for (int j = 0; j < CHANNELS; ++j) {
      const int channel = j * WARP + lane;
      if (channel < HEAD_SIZE) sum[j] += weight * parts[i * HEAD_SIZE + channel];
    }
  }
#pragma unroll
  for (int j = 0; j < CHANNELS; ++j) {
    const int channel = j * WARP + lane;
    const float mean = splits > 0 ? sum[j] / total : 0.0f;
    if (channel < HEAD_SIZE) out[row * HEAD_SIZE + channel] = narrow<T>(mean);
  }
  if (lse != nullptr && lane == 0) lse[row] = splits > 0 ? highest + logf(total) : -infinity();
}

// Attention over the union of two key sets: [rows, head_size] each, lse [rows].  A set with lse
// -inf is empty and not read; two empty sets give 0.
template <typename T>
__global__ void __launch_bounds__(ROWS* WARP)
    merge_attention(const T* __restrict__ out_a, const float* __restrict__ lse_a,
                    const T* __restrict__ out_b, const float* __restrict__ lse_b,
                    T* __restrict__ out, int64 rows, int head_size) {
  const int64 row = static_cast<int64>(blockIdx.x) * ROWS + threadIdx.y;
  if (row >= rows) return;
  const float a = lse_a[row], b = lse_b[row];
  const float highest = a > b ? a : b;
  const bool empty_a = a == -infinity(), empty_b = b == -infinity();
  const float weight_a = empty_a ? 0.0f : expf(a - highest);
  const float weight_b = empty_b ? 0.0f : expf(b - highest);
  const float total = weight_a + weight_b;
  for (int channel = threadIdx.x; channel < head_size; channel += WARP) {
    const int64 place = row * head_size + channel;
    float sum = 0.0f;
    if (!empty_a) sum += weight_a * widen(out_a[place]);
    if (!empty_b) sum += weight_b * widen(out_b[place]);
    out[place] = narrow<T>(empty_a && empty_b ? 0.0f : sum / total);
  }
}
