// Causal attention of prompt rows to their cached keys.

#include "attention.h"

using namespace nightjar;

// q: float[rows, heads, head_size], rows q_step floats apart.  Tile i is query rows
// [first_rows[i], first_rows[i] + counts[i]) of one sequence, counts[i] <= attention_tile_rows(),
// at positions positions[i] and up; its block table begins at tables[table_starts[i]].
// out: float[rows, heads, head_size], contiguous.
extern "C" void prefill_attention(const float* q, int64_t q_step, int64_t heads, const float* keys,
                                  const float* values, int64_t kv_heads, int64_t block_size,
                                  int64_t head_size, const int64_t* tables, int64_t tiles,
                                  const int64_t* first_rows, const int64_t* counts,
                                  const int64_t* positions, const int64_t* table_starts,
                                  float scale, float* out) {
  const Cache cache{keys, values, kv_heads, block_size, head_size};
  const int64_t heads_per_kv = heads / kv_heads;
#pragma omp parallel
  {
    Tile tile(head_size);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < tiles; ++i) {
      for (int64_t head = 0; head < heads; ++head) {
        alignas(64) int32_t limits[kTileRows];
        for (int r = 0; r < kTileRows; ++r) limits[r] = static_cast<int32_t>(positions[i] + r + 1);
        tile.begin(q + first_rows[i] * q_step + head * head_size, q_step, counts[i], scale);
        attend_paged(tile, cache, tables + table_starts[i], head / heads_per_kv,
                     positions[i] + counts[i], limits);
        tile.finish(out + (first_rows[i] * heads + head) * head_size, heads * head_size);
      }
    }
  }
}

// Query rows that a tile can hold.
extern "C" int attention_tile_rows() { return kTileRows; }
