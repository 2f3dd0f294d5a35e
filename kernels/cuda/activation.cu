// Bias and activation of the feed-forward block, and the gate of SwiGLU and its kin.
#include "activation.cuh"

// y[row, column] = KIND(x + bias[column]) * up; bias and up may be null.  Block (x, y): row x,
// columns y * blockDim.x * WIDTH on.  Rows of x and up may lie apart (halves of one projection).
template <typename T, typename KIND, int WIDTH>
__global__ void __launch_bounds__(128)
    activation(const T* x, const T* __restrict__ bias, const T* up, T* y, int columns,
               int64 x_stride, int64 up_stride) {
  const int64 row = blockIdx.x;
  const int place = (blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
  if (place >= columns) return;
  float v[WIDTH], other[WIDTH];
  load<WIDTH>(x + row * x_stride + place, v);
  if (bias != nullptr) {
    load<WIDTH>(bias + place, other);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[i] += other[i];
  }
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) v[i] = KIND::of(v[i]);
  if (up != nullptr) {
    load<WIDTH>(up + row * up_stride + place, other);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[i] *= other[i];
  }
  store<WIDTH>(y + row * columns + place, v);
}
