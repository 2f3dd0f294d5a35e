// Token or prompt vector of every row, scaled, plus its position: the residual stream.
#include "common.cuh"

// Block (x, y): row x, columns y * blockDim.x * WIDTH on.  An id at or past the vocabulary reads row
// bases[row] + id - vocab_size of `vectors` (none: the table's last row).  What lies in no table
// becomes NaN: the row's own request is told, and nothing is read out of bounds.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(128)
    embed(const int64* __restrict__ ids, const int64* __restrict__ positions,
          const T* __restrict__ table, const T* __restrict__ position_table,
          const float* __restrict__ vectors, const int64* __restrict__ bases,
          float* __restrict__ x, int64 vocab_size, int64 n_positions, int64 n_vectors, int columns,
          float scale) {
  const int64 row = blockIdx.x;
  const int place = (blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
  if (place >= columns) return;

  const int64 id = ids[row];
  const bool is_vector = id >= vocab_size && vectors != nullptr;
  const int64 source = is_vector ? bases[row] + id - vocab_size : min(id, vocab_size - 1);
  const int64 position = position_table == nullptr ? 0 : positions[row];
  const bool known = source >= 0 && source < (is_vector ? n_vectors : vocab_size) &&
                     position >= 0 && position < n_positions;

  float sum[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) sum[i] = not_a_number();
  if (known) {
    if (is_vector) {
      load<WIDTH>(vectors + source * columns + place, sum);
    } else {
      load<WIDTH>(table + source * columns + place, sum);
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sum[i] *= scale;
    if (position_table != nullptr) {
      float added[WIDTH];
      load<WIDTH>(position_table + position * columns + place, added);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) sum[i] += added[i];
    }
  }
  store<WIDTH>(x + row * columns + place, sum);
}
