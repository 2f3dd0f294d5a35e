// Cache blocks to and from one contiguous piece of memory a block, all layers in it.
#include "common.cuh"

// Block (x, y, z): cache block x of the list, layer y / 2 (keys where y is even, values where odd),
// words z * blockDim.x on.  packed [n, layers, 2, block_words]: what one cache block holds over all
// layers is one run, one transfer.  Caches are [layers, n_blocks, block_words]; words of 16 bytes.
template <bool PACK>
__global__ void __launch_bounds__(256)
    kv_transfer(int* __restrict__ keys, int* __restrict__ values, const int64* __restrict__ blocks,
                int* __restrict__ packed, int64 n_blocks, int block_words) {
  const int word = blockIdx.z * blockDim.x + threadIdx.x;
  if (word >= block_words) return;
  const int64 layer = blockIdx.y / 2;
  uint4* const cache = reinterpret_cast<uint4*>(blockIdx.y % 2 == 0 ? keys : values);
  uint4* const here = cache + (layer * n_blocks + blocks[blockIdx.x]) * block_words + word;
  uint4* const there =
      reinterpret_cast<uint4*>(packed) +
      (static_cast<int64>(blockIdx.x) * gridDim.y + blockIdx.y) * block_words + word;
  if constexpr (PACK) {
    *there = *here;
  } else {
    *here = *there;
  }
}
