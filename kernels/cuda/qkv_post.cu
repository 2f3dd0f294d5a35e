// Between the QKV projection and attention: norm of queries and keys, rotation, and the keys and
// values into the paged cache.
#include "heads.cuh"

constexpr int HEADS_PER_BLOCK = 4;

// A warp a head.  qkv [rows, query_heads + 2 * kv_heads, HEAD_SIZE] is changed in place; queries and
// keys are normalised and rotated, values are not.  units: heads of all rows.  Rows below cached_rows
// go to the cache [blocks, kv_heads, block_size, HEAD_SIZE] unless their block is negative (a slot of
// the batch that holds no sequence).  A cache in FP8 has scales [blocks, kv_heads, block_size], and its
// rows also become what it keeps of them.
template <typename T, typename S, int HEAD_SIZE>
__global__ void __launch_bounds__(HEADS_PER_BLOCK* WARP)
    qkv_post(T* __restrict__ qkv, const float* __restrict__ query_norm,
             const float* __restrict__ key_norm, float epsilon, const float* __restrict__ cosines,
             const float* __restrict__ sines, const int64* __restrict__ positions,
             int64 n_positions, int n_turned, S* __restrict__ keys, S* __restrict__ values,
             Fp8* __restrict__ key_scales, Fp8* __restrict__ value_scales, const int64* __restrict__ blocks,
             const int64* __restrict__ offsets, int units, int query_heads, int kv_heads,
             int cached_rows, int block_size) {
  alignas(WIDE_BYTES) __shared__ float turning[HEADS_PER_BLOCK][HEAD_SIZE];
  const HeadTables tables{query_norm, key_norm, epsilon, cosines, sines, n_positions, n_turned};

  const int heads = query_heads + 2 * kv_heads;
  const int unit = blockIdx.x * HEADS_PER_BLOCK + threadIdx.y;
  if (unit >= units) return;
  const int row = unit / heads, head = unit % heads;
  const bool is_value = head >= query_heads + kv_heads;
  const bool is_key = head >= query_heads && !is_value;
  const float* const norm = is_value ? nullptr : is_key ? key_norm : query_norm;
  const bool turns = cosines != nullptr && !is_value;
  const bool changed = norm != nullptr || turns;
  const bool is_cached = (is_key || is_value) && row < cached_rows;
  if (!changed && !is_cached) return;
  T* const place = qkv + static_cast<int64>(unit) * HEAD_SIZE;

  // All loads are issued first: blocks and offsets, the head, the angles.
  const int64 block = is_cached ? blocks[row] : -1;
  const int64 offset = is_cached ? offsets[row] : 0;
  const int64 position = turns ? positions[row] : -1;
  Head<HEAD_SIZE> own;
  own.load(place);
  Angles<HEAD_SIZE> angles;
  angles.load(tables, position);

  if (norm != nullptr) own.normalize(norm, epsilon);
  if (turns) own.turn(angles, n_turned, turning[threadIdx.y]);
  if (block >= 0) {
    const int kv_head = head - query_heads - (is_value ? kv_heads : 0);
    const int64 line = (block * kv_heads + kv_head) * block_size + offset;
    own.template keep<T>((is_value ? values : keys) + line * HEAD_SIZE,
                         IS_FP8<S> ? (is_value ? value_scales : key_scales) + line : nullptr);
  }
  if (changed || (IS_FP8<S> && block >= 0)) own.store(place);
}
