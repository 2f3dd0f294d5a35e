// Writing the keys and values of packed rows into the paged cache.

#include "common.h"
#include "team.h"

namespace nightjar {
namespace {

template <typename S>
void write(S* keys, S* values, int64_t kv_heads, int64_t block_size, int64_t head_size,
           const float* k, const float* v, int64_t step, int64_t rows, const int64_t* blocks,
           const int64_t* offsets) {
  const auto write_row = [=](int64_t row) {
    for (int64_t head = 0; head < kv_heads; ++head) {
      const int64_t from = row * step + head * head_size;
      const int64_t to = ((blocks[row] * kv_heads + head) * block_size + offsets[row]) * head_size;
      for (int64_t d = 0; d < head_size; d += kLanes) {
        store(keys + to + d, load(k + from + d));
        store(values + to + d, load(v + from + d));
      }
    }
  };
  parallel([&](Member& member) { member.share(rows, write_row); });
}

}  // namespace
}  // namespace nightjar

// keys, values: float or, if `half`, binary16 [blocks, kv_heads, block_size, head_size]; k, v:
// float[rows, kv_heads, head_size], rows `step` floats apart; blocks, offsets: int64[rows], where
// each row goes.
extern "C" void kv_write(void* keys, void* values, int64_t half, int64_t kv_heads,
                         int64_t block_size, int64_t head_size, const float* k, const float* v,
                         int64_t step, int64_t rows, const int64_t* blocks,
                         const int64_t* offsets) {
  using nightjar::Half;
  if (half) {
    nightjar::write(static_cast<Half*>(keys), static_cast<Half*>(values), kv_heads, block_size,
                    head_size, k, v, step, rows, blocks, offsets);
  } else {
    nightjar::write(static_cast<float*>(keys), static_cast<float*>(values), kv_heads, block_size,
                    head_size, k, v, step, rows, blocks, offsets);
  }
}
