// Cache blocks to and from slots: contiguous pieces of memory, all layers of a block in one.
#include "common.cuh"

// Block (x, y, z): cache block x of the list, layer y / 2 (keys where y is even, values where odd),
// words z * blockDim.x on, to or from slots[x] (slot x where there is no list).  Slots begin
// slot_words apart, so that some of the layers of packed [n, layers, 2, block_words] can be moved.
// Caches are [layers, n_blocks, block_words]; words of 16 bytes.
template <bool PACK>
__global__ void __launch_bounds__(256)
    kv_transfer(int* __restrict__ keys, int* __restrict__ values, const int64* __restrict__ blocks,
                const int64* __restrict__ slots, int* __restrict__ packed, int64 n_blocks,
                int64 slot_words, int block_words) {
  const int word = blockIdx.z * blockDim.x + threadIdx.x;
  if (word >= block_words) return;
  const int64 layer = blockIdx.y / 2;
  uint4* const cache = reinterpret_cast<uint4*>(blockIdx.y % 2 == 0 ? keys : values);
  uint4* const here = cache + (layer * n_blocks + blocks[blockIdx.x]) * block_words + word;
  const int64 slot = slots == nullptr ? blockIdx.x : slots[blockIdx.x];
  uint4* const there = reinterpret_cast<uint4*>(packed) + slot * slot_words +
                       static_cast<int64>(blockIdx.y) * block_words + word;
  if constexpr (PACK) {
    *there = *here;
  } else {
    *here = *there;
  }
}
