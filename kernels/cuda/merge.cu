// One attention from partial ones: the splits of decode attention, or two sets of keys.
#include "common.cuh"

constexpr int ROWS = 4;  // of a block: a warp each

constexpr int AHEAD = 8;  // splits that are asked for before any of them is needed
constexpr int CHANNELS = WIDE<float>;  // of a lane

// The splits of each (sequence, head), in ascending order of position: out [batch, heads,
// HEAD_SIZE]; lse [batch, heads] or null.  parts and stats are what decode_attention wrote; splits
// from the sequence's end on were not written and are not read.
template <typename T, int HEAD_SIZE, int SPLIT>
__global__ void __launch_bounds__(ROWS* WARP)
    merge_splits(const float* __restrict__ parts, const float* __restrict__ stats,
                 const int* __restrict__ lengths, T* __restrict__ out, float* __restrict__ lse,
                 int64 rows, int heads, int max_splits) {
  static_assert(HEAD_SIZE % CHANNELS == 0 && HEAD_SIZE <= WARP * CHANNELS, "a warp holds a row");
  static_assert(WARP % AHEAD == 0, "whole times AHEAD splits of a warp");
  const int64 row = static_cast<int64>(blockIdx.x) * ROWS + threadIdx.y;
  if (row >= rows) return;
  const int lane = threadIdx.x;
  const bool idle = lane * CHANNELS >= HEAD_SIZE;
  const int channel = idle ? 0 : lane * CHANNELS;  // the idle read what is read anyway
  const int splits = min(max_splits, (lengths[row / heads] + SPLIT - 1) / SPLIT);
  parts += row * max_splits * HEAD_SIZE + channel;
  stats += row * max_splits * 2;
  float total = 0.0f, highest = -infinity(), sum[CHANNELS] = {}, part[AHEAD][CHANNELS];
  const auto ask = [&](int first) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {  // the last one again in place of any after it
      load<CHANNELS>(parts + min(first + i, splits - 1) * HEAD_SIZE, part[i]);
    }
  };

  if (splits > 0) ask(0);  // on their way while the stats are
#pragma unroll 4
  for (int i = lane; i < splits; i += WARP) highest = fmaxf(highest, stats[2 * i]);
  highest = warp_max(highest);
  float weight = 0.0f, share = 0.0f;
  for (int first = 0; first < splits; first += AHEAD) {
    if (first > 0) ask(first);
    if (first % WARP == 0) {  // each lane weighs one of the next splits; past the last, nothing
      float own[2] = {-infinity(), 0.0f};
      if (first + lane < splits) load<2>(stats + 2 * (first + lane), own);
      weight = expf(own[0] - highest);
      share = weight * own[1];
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const float scale = __shfl_sync(WHOLE_WARP, weight, first % WARP + i);
      total += __shfl_sync(WHOLE_WARP, share, first % WARP + i);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) sum[c] += scale * part[i][c];
    }
  }
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) sum[c] = splits > 0 ? sum[c] / total : 0.0f;
  if (!idle) store<CHANNELS>(out + row * HEAD_SIZE + channel, sum);
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
