// One attention from the partial ones of two sets of keys.
#include "common.cuh"

constexpr int ROWS = 4;  // of a block: a warp each

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
