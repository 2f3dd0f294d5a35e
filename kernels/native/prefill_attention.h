// Causal attention of prompt rows to their cached keys.
#pragma once

#include "attention.h"
#include "team.h"

namespace nightjar {

// Prompt rows in tiles, as Python hands them over: see attention.py.
//
// q: [rows, heads, head_size] in the cache's numbers, rows `step` of them apart.  Tile i is query rows
// [first_rows[i], first_rows[i] + counts[i]) of one sequence, counts[i] <= kTileRows, at positions
// positions[i] and up; its block table begins at tables[table_starts[i]].  out: [rows, heads,
// head_size], in the same numbers.
struct Prompts {
  const void* q;
  int64_t step;
  int64_t heads;
  void* out;
  const int64_t* tables;
  int64_t tiles;
  const int64_t* first_rows;
  const int64_t* counts;
  const int64_t* positions;
  const int64_t* table_starts;
};

// Called by all members of a region.
template <typename S>
void attend(Member& member, const Prompts& rows, const Cache<S>& cache, float scale) {
  const int64_t size = cache.head_size, heads = rows.heads, heads_per_kv = heads / cache.kv_heads;
  Tile tile(size);
  member.take(rows.tiles * heads, [&](int64_t place) {
    const int64_t i = place / heads, head = place % heads;
    const int64_t first = rows.first_rows[i], count = rows.counts[i];
    const S* queries = static_cast<const S*>(rows.q) + first * rows.step + head * size;
    S* out = static_cast<S*>(rows.out) + (first * heads + head) * size;
    // The next head's queries are next to these, and so are its results.
    for (int64_t r = 0; r < count; ++r) {
      fetch(queries + r * rows.step + size, size);
      fetch_to_write(out + r * heads * size, size);
    }
    attend_apart(count, [&](int64_t from, int64_t n) {
      const int64_t position = rows.positions[i] + from;
      alignas(64) int32_t limits[kTileRows];
      for (int r = 0; r < kTileRows; ++r) {
        limits[r] = r < n ? static_cast<int32_t>(position + r + 1) : 0;
      }
      tile.begin(queries + from * rows.step, rows.step, n, scale);
      attend_paged(tile, cache, rows.tables + rows.table_starts[i], head / heads_per_kv,
                   position + n, limits);
      return tile.finish(out + from * heads * size, heads * size);
    });
  });
}

}  // namespace nightjar
