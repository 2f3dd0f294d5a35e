// Causal attention of prompt rows to their cached keys.

#include "attention.h"
#include "team.h"

namespace nightjar {
namespace {

struct Tiles {
  int64_t count;
  const int64_t* first_rows;
  const int64_t* counts;
  const int64_t* positions;
  const int64_t* table_starts;
};

template <typename S>
void prefill(const float* q, int64_t q_step, int64_t heads, const Cache<S>& cache,
             const int64_t* tables, const Tiles& tiles, float scale, float* out) {
  const int64_t size = cache.head_size, heads_per_kv = heads / cache.kv_heads;
  parallel([&](Member& member) {
    Tile tile(size);
    member.take(tiles.count * heads, [&](int64_t place) {
      const int64_t i = place / heads, head = place % heads;
      const int64_t first = tiles.first_rows[i], count = tiles.counts[i];
      const int64_t position = tiles.positions[i];
      alignas(64) int32_t limits[kTileRows];
      for (int r = 0; r < kTileRows; ++r) {
        limits[r] = r < count ? static_cast<int32_t>(position + r + 1) : 0;
      }
      const float* queries = q + first * q_step + head * size;
      tile.begin(queries, q_step, count, scale);
      // The next head's queries are next to these, and so are its results.
      for (int64_t r = 0; r < count; ++r) {
        fetch_line(queries + r * q_step + size, size);
        fetch_to_write(out + ((first + r) * heads + head) * size, size);
      }
      attend_paged(tile, cache, tables + tiles.table_starts[i], head / heads_per_kv,
                   position + count, limits);
      tile.finish(out + (first * heads + head) * size, heads * size);
    });
  });
}

}  // namespace
}  // namespace nightjar

using namespace nightjar;

// q: float[rows, heads, head_size], rows q_step floats apart.  keys, values: float, or binary16 if
// `half`.  Tile i is query rows [first_rows[i], first_rows[i] + counts[i]) of one sequence,
// counts[i] <= attention_tile_rows(), at positions positions[i] and up; its block table begins at
// tables[table_starts[i]].  out: float[rows, heads, head_size], contiguous.
extern "C" void prefill_attention(const float* q, int64_t q_step, int64_t heads, const void* keys,
                                  const void* values, int64_t half, int64_t kv_heads,
                                  int64_t block_size, int64_t head_size, const int64_t* tables,
                                  int64_t tiles, const int64_t* first_rows, const int64_t* counts,
                                  const int64_t* positions, const int64_t* table_starts,
                                  float scale, float* out) {
  const Tiles all{tiles, first_rows, counts, positions, table_starts};
  with_cache(keys, values, half, kv_heads, block_size, head_size, [&](const auto& cache) {
    prefill(q, q_step, heads, cache, tables, all, scale, out);
  });
}

// Query rows that a tile can hold.
extern "C" int attention_tile_rows() { return kTileRows; }
