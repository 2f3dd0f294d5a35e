// Residual + delta, then LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) of each row.
#include "product_rows.cuh"

// One row a warp (ROW_THREADS 32, blockDim.y rows a block, no barrier) or a block (256).  Which one
// depends on the row's length and alignment alone, so the tree of its sums does too.  The row stays
// in registers between the passes: it is read once, and the variance is that of the centred values.
// The bounds leave 64 registers a thread, and all it wants where it holds 64 elements.
//
// x [rows, columns] is changed only where there is a delta; row r begins at
// x + r / group * x_stride + r % group * columns (heads of a packed projection: group > 1), and
// likewise in y.  CENTRED: LayerNorm, else RMSNorm, which has no bias.
//
// Y is Fp8: the rows of a product in FP8, rounded to Rounded first; `scales` gets each row's scale.
template <typename X, typename D, typename Y, bool CENTRED, int ROW_THREADS, int VECTORS, int WIDTH>
__global__ void __launch_bounds__(ROW_THREADS == WARP ? 4 * WARP : ROW_THREADS,
                                  ROW_THREADS == WARP ? 8 : VECTORS * WIDTH > 16 ? 1 : 4)
    norm(X* x, const D* __restrict__ delta, const float* __restrict__ weight,
         const float* __restrict__ bias, Y* y, float* __restrict__ scales, int64 rows, int columns,
         int group, int64 x_stride, int64 y_stride, float epsilon) {
  const int64 row = static_cast<int64>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= rows) return;  // whole warps, and only where rows are warps
  x += row / group * x_stride + row % group * columns;
  y += row / group * y_stride + row % group * columns;

  float v[VECTORS][WIDTH];
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const int place = (j * ROW_THREADS + static_cast<int>(threadIdx.x)) * WIDTH;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) v[j][i] = 0.0f;
    if (place < columns) {
      load<WIDTH>(x + place, v[j]);
      if (delta != nullptr) {
        float added[WIDTH];
        load<WIDTH>(delta + row * columns + place, added);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) v[j][i] += added[i];
        store<WIDTH>(x + place, v[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum += CENTRED ? v[j][i] : v[j][i] * v[j][i];
  }
  float mean = 0.0f;
  if constexpr (CENTRED) {
    mean = block_sum<ROW_THREADS / WARP>(sum) / columns;
    sum = 0.0f;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const int place = (j * ROW_THREADS + static_cast<int>(threadIdx.x)) * WIDTH;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        v[j][i] -= mean;
        if (place < columns) sum += v[j][i] * v[j][i];
      }
    }
  }
  const float variance = block_sum<ROW_THREADS / WARP>(sum) / columns;
  const float inverse = 1.0f / sqrtf(variance + epsilon);
  unsigned peak = 0;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const int place = (j * ROW_THREADS + static_cast<int>(threadIdx.x)) * WIDTH;
    if (place < columns) {
      float scaled[WIDTH], shift[WIDTH];
      load<WIDTH>(weight + place, scaled);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) scaled[i] *= v[j][i] * inverse;
      if constexpr (CENTRED) {
        load<WIDTH>(bias + place, shift);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) scaled[i] += shift[i];
      }
      if constexpr (IS_FP8<Y>) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
          v[j][i] = widen(narrow<Rounded>(scaled[i]));
          peak = max(peak, magnitude(v[j][i]));
        }
      } else {
        store<WIDTH>(y + place, scaled);
      }
    }
  }
  if constexpr (IS_FP8<Y>) {
    const RowScale found = row_scale(block_max<ROW_THREADS / WARP>(peak));
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
      const int place = (j * ROW_THREADS + static_cast<int>(threadIdx.x)) * WIDTH;
      if (place < columns) store_codes(y + place, v[j], found.inverse);
    }
    if (threadIdx.x == 0) scales[row] = found.scale;
  }
}
