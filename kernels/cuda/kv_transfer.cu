// Cache blocks to and from slots: contiguous pieces of memory, all layers of a block in one.
#include "common.cuh"

constexpr int THREADS = 256;
constexpr int AHEAD = 4;  // words of a thread on their way
constexpr int PIECE = THREADS * AHEAD;

// Blocks take pieces in turn: of cache block i of the list, of one plane of it (keys of a layer where
// it is even, values where odd), PIECE words, to or from slots[i] (slot i where there is no list).
// Slots begin slot_words apart, so that some of the layers of packed [n, planes / 2, 2, block_words]
// can be moved.  Caches are [planes / 2, n_blocks, block_words]; words of 16 bytes.
template <bool PACK>
__global__ void __launch_bounds__(THREADS)
    kv_transfer(int* __restrict__ keys, int* __restrict__ values, const int64* __restrict__ blocks,
                const int64* __restrict__ slots, int* __restrict__ packed, int64 pieces,
                int planes, int64 n_blocks, int64 slot_words, int block_words) {
  const int of_plane = (block_words + PIECE - 1) / PIECE;  // pieces
  for (int64 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const int64 before = piece / of_plane, i = before / planes;
    const int plane = static_cast<int>(before - i * planes);
    const int first = static_cast<int>(piece - before * of_plane) * PIECE + threadIdx.x;
    uint4* const cache = reinterpret_cast<uint4*>(plane % 2 == 0 ? keys : values);
    uint4* const here = cache + (plane / 2 * n_blocks + blocks[i]) * block_words;
    uint4* const there = reinterpret_cast<uint4*>(packed) +
                         (slots == nullptr ? i : slots[i]) * slot_words +
                         static_cast<int64>(plane) * block_words;
    const uint4* const from = PACK ? here : there;
    uint4* const to = PACK ? there : here;
    uint4 words[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {  // past the end the last one: a branch would wait for each
      words[j] = from[min(first + j * THREADS, block_words - 1)];
    }
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      if (first + j * THREADS < block_words) to[first + j * THREADS] = words[j];
    }
  }
}
