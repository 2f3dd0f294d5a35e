// Attention of one new token a sequence to its cached keys and values, its own among them: split-KV.
#include "decode_rows.cuh"
#include "decode_tiles.cuh"
#include "heads.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;

// Whether tensor cores compute it: what a byte of the cache costs in instructions grows with the heads
// that share it.
template <typename T, int GROUP>
constexpr bool IN_TILES = sizeof(T) == 2 && GROUP >= 4;

template <typename T, typename S, int HEAD_SIZE, int GROUP, int SPLIT,
          bool TILES = IN_TILES<T, GROUP>>
struct Ways {
  using Way = RowWise<T, S, HEAD_SIZE, GROUP, THREADS, SPLIT>;
};
template <typename T, typename S, int HEAD_SIZE, int GROUP, int SPLIT>
struct Ways<T, S, HEAD_SIZE, GROUP, SPLIT, true> {
  using Way = TileWise<T, S, HEAD_SIZE, GROUP, THREADS, SPLIT>;
};

// Blocks of a multiprocessor that registers must suffice for: enough loads are under way then, and
// the compiler has a bound to keep to.
template <typename T, int GROUP>
constexpr int RESIDENT_BLOCKS = GROUP == 8 || IN_TILES<T, GROUP> ? 4 : 5;

constexpr int PARTS_AHEAD = 8;  // parts that are loaded before any of them is needed

// What other blocks have written: from the cache that all multiprocessors share.
__device__ __forceinline__ void load_shared(const float* from, float (&to)[4]) {
  const float4 raw = __ldcg(reinterpret_cast<const float4*>(from));
  to[0] = raw.x, to[1] = raw.y, to[2] = raw.z, to[3] = raw.w;
}
__device__ __forceinline__ void load_shared(const float* from, float (&to)[2]) {
  const float2 raw = __ldcg(reinterpret_cast<const float2*>(from));
  to[0] = raw.x, to[1] = raw.y;
}

// The splits of one (sequence, head) added up by a warp, in ascending order of position: parts
// [splits, HEAD_SIZE], stats [splits, 2]; out [HEAD_SIZE]; lse one number, or null.
template <typename T, int HEAD_SIZE>
__device__ __forceinline__ void merge_splits(const float* parts, const float* stats, int splits,
                                             T* out, float* lse) {
  constexpr int CHANNELS = WIDE<float>;  // of a lane
  static_assert(HEAD_SIZE % CHANNELS == 0 && HEAD_SIZE <= WARP * CHANNELS, "a warp holds a row");
  static_assert(WARP % PARTS_AHEAD == 0, "whole times PARTS_AHEAD splits of a warp");
  const int lane = threadIdx.x % WARP;
  const bool idle = lane * CHANNELS >= HEAD_SIZE;
  const int channel = idle ? 0 : lane * CHANNELS;  // idle lanes read what is read anyway
  float total = 0.0f, highest = -infinity(), sum[CHANNELS] = {}, part[PARTS_AHEAD][CHANNELS];
  const auto ask = [&](int first) {
#pragma unroll
    for (int i = 0; i < PARTS_AHEAD; ++i) {  // the last one again in place of any after it
      load_shared(parts + min(first + i, splits - 1) * HEAD_SIZE + channel, part[i]);
    }
  };
  ask(0);  // on their way while the stats are
#pragma unroll 4
  for (int i = lane; i < splits; i += WARP) highest = fmaxf(highest, __ldcg(stats + 2 * i));
  highest = warp_max(highest);
  float weight = 0.0f, share = 0.0f;
  for (int first = 0; first < splits; first += PARTS_AHEAD) {
    if (first > 0) ask(first);
    if (first % WARP == 0) {  // each lane weighs one of the next splits; past the last, nothing
      float own[2] = {-infinity(), 0.0f};
      if (first + lane < splits) load_shared(stats + 2 * (first + lane), own);
      weight = expf(own[0] - highest);
      share = weight * own[1];
    }
#pragma unroll
    for (int i = 0; i < PARTS_AHEAD; ++i) {
      const float scale = __shfl_sync(WHOLE_WARP, weight, first % WARP + i);
      total += __shfl_sync(WHOLE_WARP, share, first % WARP + i);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) sum[c] += scale * part[i][c];
    }
  }
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) sum[c] /= total;
  if (!idle) store<CHANNELS>(out + channel, sum);
  if (lse != nullptr && lane == 0) *lse = highest + logf(total);
}

// Whether this is the last of so many blocks to come here; what the others wrote before can be read
// then, past the caches of a multiprocessor.  arrived: 0 before the first comes, and after the last.
// A barrier on both sides of the count: the first thread publishes and acquires for its whole block.
__device__ __forceinline__ bool comes_last(int* arrived, int blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = add_acq_rel(arrived, 1) == blocks - 1;
    if (last) atomicExch(arrived, 0);
  }
  __syncthreads();
  return last;
}

// Whether the blocks that have a split are so few that all of them run together; asked by a whole warp.
// Tables are wider than sequences are long, and slots of the batch are free.
template <int SPLIT>
__device__ __forceinline__ bool run_together(const int* lengths, int resident) {
  const int sequences = gridDim.y;
  if (static_cast<int>(gridDim.x) * sequences > resident) return false;
  int blocks = 0;
  for (int i = threadIdx.x % WARP; i < sequences; i += WARP) {
    blocks += min((lengths[i] + SPLIT - 1) / SPLIT, static_cast<int>(gridDim.z));
  }
  return warp_sum(blocks) * static_cast<int>(gridDim.x) <= resident;
}

// Block (x, y, z): GROUP query heads that share a KV head, of sequence y, over the splits z, z +
// gridDim.z and so on.  Split i is the positions [i * SPLIT, (i + 1) * SPLIT): cut where it is cut for
// every sequence, batch and grid, so that a row's sums depend on its own length alone.  Positions from
// lengths[y] on are not read.  splits: of the longest sequence that the block tables have room for.
//
// heads: a row of query heads each, row_stride apart; where `blocks` is given, key and value heads
// follow, all as the projection left them: they are normalised and rotated here, and the block of the
// newest position writes its key and value to the cache, at a position of a cache block (negative:
// nowhere).  Then no more than GROUP query heads may share a KV head, or several blocks would write.
//
// resident: so many blocks run together.  If all blocks with a split run together, each prefetches its
// whole first split before anything else: so few blocks do not keep memory busy otherwise.
//
// The result goes to out [batch, heads, HEAD_SIZE] and lse [batch, heads] (if given).  Of several
// splits, sums of exp(score - maximum) * value go to parts [batch, heads, splits, HEAD_SIZE], and
// (maximum, sum of exponentials) to stats [batch, heads, splits, 2], which the last block of these
// heads merges; arrived [batch, gridDim.x], zeros, counts its blocks.  keys, values: [blocks, kv_heads,
// 1 << block_shift, HEAD_SIZE], of S: T, or FP8 with scales [blocks, kv_heads, 1 << block_shift] each.
template <typename T, typename S, int HEAD_SIZE, int GROUP, int SPLIT>
__global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS<T, GROUP>)
    decode_attention(const T* __restrict__ heads, int64 row_stride,
                     const float* __restrict__ query_norm, const float* __restrict__ key_norm,
                     float epsilon, const float* __restrict__ cosines,
                     const float* __restrict__ sines, const int64* __restrict__ positions,
                     int64 n_positions, int n_turned, const int64* __restrict__ blocks,
                     const int64* __restrict__ offsets, S* keys, S* values, Fp8* key_scales,
                     Fp8* value_scales, const int* __restrict__ block_tables, int table_width,
                     const int* __restrict__ lengths, int splits, int kv_heads, int heads_per_kv,
                     int block_shift, int resident, float scale, T* __restrict__ out,
                     float* __restrict__ lse, float* parts, float* stats, int* arrived) {
  using Way = typename Ways<T, S, HEAD_SIZE, GROUP, SPLIT>::Way;
  constexpr int PIECE = Way::CHANNELS;
  __shared__ Vector<typename Way::Query, PIECE> queries[GROUP][(HEAD_SIZE + Way::APART) / PIECE];
  __shared__ float weights[GROUP][SPLIT + Way::APART];
  __shared__ Vector<float, PIECE> sums[WARPS][GROUP][HEAD_SIZE / PIECE];
  __shared__ float maxima[GROUP], totals[GROUP];

  const int slices = (heads_per_kv + GROUP - 1) / GROUP;
  const int kv_head = blockIdx.x / slices;
  const int first_head = kv_head * heads_per_kv + blockIdx.x % slices * GROUP;
  const int here = min(GROUP, (kv_head + 1) * heads_per_kv - first_head);  // heads of this block
  const int64 sequence = blockIdx.y;
  const int64 first_row = sequence * kv_heads * heads_per_kv + first_head;
  const int64 newest_block = blocks == nullptr ? -1 : blocks[sequence];
  const int64 newest_offset = blocks == nullptr ? 0 : offsets[sequence];
  const int64 position = cosines == nullptr ? -1 : positions[sequence];
  const int length = lengths[sequence];
  const int filled = (length + SPLIT - 1) / SPLIT;  // splits that hold something
  const int working = min(filled, static_cast<int>(gridDim.z));  // blocks that have one
  if (static_cast<int>(blockIdx.z) >= max(1, working)) return;

  // By the warp with the fewest heads.
  if (threadIdx.x / WARP == WARPS - 1 && run_together<SPLIT>(lengths, resident)) {
    const int first = blockIdx.z * SPLIT, last = min(first + SPLIT, length);
    const int block_size = 1 << block_shift, run = min(block_size, SPLIT);
    for (int i = first + static_cast<int>(threadIdx.x) % WARP * run; i < last; i += WARP * run) {
      const int block = block_tables[sequence * table_width + (i >> block_shift)];
      const int64 line = (static_cast<int64>(block * kv_heads + kv_head) << block_shift) +
                         (i & (block_size - 1));
      const int bytes = min(run, last - i) * HEAD_SIZE * static_cast<int>(sizeof(S));
      fetch_ahead(keys + line * HEAD_SIZE, bytes);
      fetch_ahead(values + line * HEAD_SIZE, bytes);
      if (IS_FP8<S> && run % WIDE_BYTES == 0) {
        fetch_ahead(key_scales + line, run);
        fetch_ahead(value_scales + line, run);
      }
    }
  }

  // The queries, a warp a head, for all splits: kept by the threads, they would take the registers of
  // the sums.  And the newest key and value, which the barrier shows to the whole block.
  const HeadTables tables{query_norm, key_norm, epsilon, cosines, sines, n_positions, n_turned};
  const bool writes = newest_block >= 0 && length > 0 &&
                      (filled - 1) % static_cast<int>(gridDim.z) == static_cast<int>(blockIdx.z);
#pragma unroll 1
  for (int unit = threadIdx.x / WARP; unit < (writes ? GROUP + 2 : GROUP); unit += WARPS) {
    const bool is_key = unit == GROUP, is_value = unit > GROUP;
    const int head = is_value ? kv_heads * (heads_per_kv + 1) + kv_head
                     : is_key ? kv_heads * heads_per_kv + kv_head
                              : first_head + min(unit, here - 1);
    const float* const norm = is_value ? nullptr : is_key ? key_norm : query_norm;
    const bool turns = cosines != nullptr && !is_value;
    Head<HEAD_SIZE> own;
    own.load(heads + sequence * row_stride + head * HEAD_SIZE);
    Angles<HEAD_SIZE> angles;
    angles.load(tables, turns ? position : -1);
    if (norm != nullptr) own.normalize(norm, epsilon);
    if (turns) own.turn(angles, n_turned, sums[threadIdx.x / WARP][0][0].at);
    if (unit < GROUP) {
      own.template round_and_scale<T>(Way::SCALED ? scale : 1.0f);
      own.store(queries[unit][0].at);
    } else {
      const int64 line = ((newest_block * kv_heads + kv_head) << block_shift) + newest_offset;
      own.template keep<T>((is_value ? values : keys) + line * HEAD_SIZE,
                           IS_FP8<S> ? (is_value ? value_scales : key_scales) + line : nullptr);
    }
  }
  __syncthreads();
  if (length <= 0) {
    for (int i = threadIdx.x; i < here * HEAD_SIZE; i += THREADS) {
      out[first_row * HEAD_SIZE + i] = narrow<T>(0.0f);
    }
    if (lse != nullptr && static_cast<int>(threadIdx.x) < here) {
      lse[first_row + threadIdx.x] = -infinity();
    }
  }

#pragma unroll 1
  for (int split = blockIdx.z; split * SPLIT < length; split += gridDim.z) {
    // What follows from the thread would be kept over the loop, and take the registers of the loads.
    const int thread = opaque(threadIdx.x), warp = thread / WARP, lane = thread % WARP;
    const int* const table = block_tables + sequence * table_width;
    const int block_size = 1 << block_shift;
    const int start = split * SPLIT, count = min(SPLIT, length - start);
    const auto line_at = [&](int i) {  // where position start + i lies in either cache, in rows
      const int position = start + i;
      const int block = table[position >> block_shift];
      return ((block * kv_heads + kv_head) << block_shift) + (position & (block_size - 1));
    };

    Way way(thread, count);
    way.score(keys, key_scales, line_at, queries, scale, weights);
    __syncthreads();
    way.ask(values, value_scales, line_at);  // on their way during the softmax

    // Softmax of the split, a warp a head; positions past the end weigh nothing.
#pragma unroll 1
    for (int g = warp; g < GROUP; g += WARPS) {
      float own[SPLIT / WARP], highest = -infinity(), total = 0.0f;
#pragma unroll
      for (int j = 0; j < SPLIT / WARP; ++j) {
        const int i = j * WARP + lane;
        own[j] = i < count ? weights[g][i] : -infinity();
        highest = fmaxf(highest, own[j]);
      }
      highest = warp_max(highest);
#pragma unroll
      for (int j = 0; j < SPLIT / WARP; ++j) {
        const float weight = expf(own[j] - highest);
        weights[g][j * WARP + lane] = weight;
        total += weight;
      }
      total = warp_sum(total);
      if (lane == 0) {
        maxima[g] = highest;
        totals[g] = total;
      }
    }
    __syncthreads();

    way.weigh(values, value_scales, line_at, weights, sums[warp]);
    __syncthreads();

    for (int i = thread; i < here * HEAD_SIZE; i += THREADS) {
      const int g = i / HEAD_SIZE, place = i % HEAD_SIZE;
      float whole = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) whole += sums[w][g][place / PIECE].at[place % PIECE];
      if (filled == 1) {
        out[first_row * HEAD_SIZE + i] = narrow<T>(whole / totals[g]);
      } else {
        parts[((first_row + g) * splits + split) * HEAD_SIZE + i % HEAD_SIZE] = whole;
      }
    }
    if (thread < here) {
      const int64 row = first_row + thread;
      const float highest = maxima[thread], total = totals[thread];
      if (filled > 1) {
        stats[(row * splits + split) * 2] = highest;
        stats[(row * splits + split) * 2 + 1] = total;
      } else if (lse != nullptr) {
        lse[row] = highest + logf(total);
      }
    }
  }

  if (filled <= 1) return;
  if (!comes_last(arrived + sequence * gridDim.x + blockIdx.x, working)) return;
#pragma unroll 1
  for (int g = threadIdx.x / WARP; g < here; g += WARPS) {
    const int64 row = first_row + g;
    merge_splits<T, HEAD_SIZE>(parts + row * splits * HEAD_SIZE, stats + row * splits * 2, filled,
                               out + row * HEAD_SIZE, lse == nullptr ? nullptr : lse + row);
  }
}
