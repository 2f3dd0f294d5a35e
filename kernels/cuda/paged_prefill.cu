// Attention of prompt rows to keys and values where they lie in the pages of the cache.
#include "prompt_floats.cuh"
#include "prompt_tiles.cuh"

// Blocks of a multiprocessor that registers must suffice for: sums of wide heads need more.
template <typename T, int HEAD_SIZE>
constexpr int RESIDENT_BLOCKS = sizeof(T) == 2 && HEAD_SIZE > 64 ? 2 : 3;

// Every tile of keys begins at a multiple of KEYS and is added in ascending order, and no two rows are
// summed together.  So a row's bits depend on its own keys alone: not on how its prompt was cut into
// chunks, and not on the other rows of its block.
template <typename T, typename S, int HEAD_SIZE>
__device__ __forceinline__ void attend(const QueryRows& rows, const Pages& pages,
                                       const T* __restrict__ q, int64 row_stride,
                                       const Cached<S>& cached, float scale, T* __restrict__ out,
                                       float* __restrict__ lse) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  if constexpr (sizeof(T) == 2) {
    __shared__ SharedTiles<T, S, HEAD_SIZE> shared;
    NextTile<T, S, HEAD_SIZE> next;
    TileRows<T, S, HEAD_SIZE> own(rows, warp, lane);
    if (pages.end > 0) {
      next.load_keys(cached, pages, 0);
      next.load_values(cached, pages, 0);
      own.load(q, row_stride, rows);
      next.store_keys(shared, 0);
      next.store_values(shared, 0);
    }
    __syncthreads();
    // What is written in a turn was read before the last barrier.
    for (int first = 0, turn = 0; first < pages.end; first += KEYS, turn ^= 1) {
      const bool more = first + KEYS < pages.end;
      if (more) next.load_keys(cached, pages, first + KEYS);
      own.weigh(shared, turn, first, scale);
      if (more) next.store_keys(shared, turn ^ 1);
      if (more) next.load_values(cached, pages, first + KEYS);
      own.add(shared.values[turn], first);
      if (more) next.store_values(shared, turn ^ 1);
      __syncthreads();
    }
    own.store(out, lse, rows);
  } else {
    __shared__ SharedFloats<HEAD_SIZE> shared;
    FloatRows<S, HEAD_SIZE> own(shared, warp, lane);
    own.load(q, row_stride, rows);
    for (int first = 0; first < pages.end; first += KEYS) {
      own.add(cached, pages, first, scale);
    }
    own.store(out, lse, rows);
  }
}

// Block (x, y): query rows of key head x, of tile y.  tiles [tiles, 2]: a chunk, and the first of its
// query rows, token by token (see QueryRows); a chunk below 0 is no work.  chunks [n, 3]: its first
// token in q, its tokens, and the positions that the first of them sees.  causal: each later token sees
// one position more.  block_tables [n, table_width]: of the sequence of each chunk.
//
// q: query heads of each token, row_stride apart; keys, values: [blocks, kv_heads, 1 << block_shift,
// HEAD_SIZE]; key_scales, value_scales: in FP8, the exponents of their rows; scale: of scores; out
// [tokens, heads, HEAD_SIZE]; lse [tokens, heads], the log-sum-exp, or null.
template <typename T, typename S, int HEAD_SIZE>
__global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS<T, HEAD_SIZE>)
    paged_prefill(const T* __restrict__ q, int64 row_stride, const S* __restrict__ keys,
                  const S* __restrict__ values, const Fp8* __restrict__ key_scales,
                  const Fp8* __restrict__ value_scales, const int* __restrict__ block_tables,
                  int table_width, const int* __restrict__ chunks, const int* __restrict__ tiles,
                  int kv_heads, int heads_per_kv, int block_shift, int causal, float scale,
                  T* __restrict__ out, float* __restrict__ lse) {
  constexpr int ROWS = sizeof(T) == 2 ? TILE_ROWS : FLOAT_ROWS;
  const int chunk = tiles[2 * blockIdx.y], kv_head = blockIdx.x;
  if (chunk < 0) return;
  const int* const found = chunks + 3 * chunk;
  const QueryRows rows{found[0],    tiles[2 * blockIdx.y + 1], found[1] * heads_per_kv,
                       found[2],    causal != 0,               heads_per_kv,
                       kv_head,     kv_heads};
  const Pages pages{block_tables + static_cast<int64>(chunk) * table_width, kv_head, kv_heads,
                    block_shift, rows.limit(ROWS - 1)};
  const Cached<S> cached{keys, values, key_scales, value_scales};
  attend<T, S, HEAD_SIZE>(rows, pages, q, row_stride, cached, scale * LOG2_E, out, lse);
}
