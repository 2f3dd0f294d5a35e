// Writing the keys and values of packed rows into the paged cache.

#include "common.h"

// keys, values: float[blocks, kv_heads, block_size, head_size]; k, v: float[rows, kv_heads,
// head_size], rows `step` floats apart; blocks, offsets: int64[rows], where each row goes.
extern "C" void kv_write(float* keys, float* values, int64_t kv_heads, int64_t block_size,
                         int64_t head_size, const float* k, const float* v, int64_t step,
                         int64_t rows, const int64_t* blocks, const int64_t* offsets) {
  const size_t bytes = head_size * sizeof(float);
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t head = 0; head < kv_heads; ++head) {
      const int64_t from = row * step + head * head_size;
      const int64_t place = (blocks[row] * kv_heads + head) * block_size + offsets[row];
      std::memcpy(keys + place * head_size, k + from, bytes);
      std::memcpy(values + place * head_size, v + from, bytes);
    }
  }
}
