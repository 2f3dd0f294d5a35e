// Attention of documents to their own rows and to the cached keys of the prefix before them.
#pragma once

#include "attention.h"
#include "team.h"

namespace nightjar {

// Document rows in tiles, as Python hands them over: see attention.py.
//
// q: [rows, heads, head_size]; k, v: [rows, kv_heads, head_size], the documents' own; all in the
// cache's numbers, with rows `step` of them apart.  Tile i is rows [first_rows[i], first_rows[i] +
// counts[i]), all after one prefix: prefix_lengths[i] cached tokens, whose block table begins at
// tables[table_starts[i]].  first_of: int64[rows], the first row of each row's document.  out: [rows,
// heads, head_size], in the same numbers.
struct Documents {
  const void* q;
  const void* k;
  const void* v;
  int64_t step;
  int64_t heads;
  void* out;
  const int64_t* tables;
  int64_t tiles;
  const int64_t* first_rows;
  const int64_t* counts;
  const int64_t* table_starts;
  const int64_t* prefix_lengths;
  const int64_t* first_of;
};

// Keys or values of neighbouring rows in FP32: where they lie and how far apart, or next to each other
// in `room`.
struct Gathered {
  const float* rows;
  int64_t step;

  Gathered(const float* from, int64_t from_step, int64_t, int64_t, float*)
      : rows(from), step(from_step) {}
  Gathered(const Half* from, int64_t from_step, int64_t n, int64_t size, float* room)
      : rows(room), step(size) {
    for (int64_t i = 0; i < n; ++i) widened(from + i * from_step, size, room + i * size);
  }
};

// Attend to the documents that rows [first, end) belong to, each in pieces from its own beginning.
template <typename S>
void attend_documents(Tile& tile, const Documents& rows, int64_t size, int64_t first, int64_t end,
                      int64_t place) {
  alignas(64) int32_t visible[kTileRows];
  for (int64_t row = first; row < end;) {
    const int64_t document = rows.first_of[row];
    int64_t last = row;
    while (last < end && rows.first_of[last] == document) ++last;
    for (int64_t start = document; start < last; start += kPieceKeys) {
      for (int r = 0; r < kTileRows; ++r) {
        const bool own = first + r >= row && first + r < last;
        visible[r] = own ? static_cast<int32_t>(first + r + 1 - start) : 0;
      }
      const int64_t from = start * rows.step + place;
      const int64_t n = std::min<int64_t>(kPieceKeys, last - start);
      const Gathered keys(static_cast<const S*>(rows.k) + from, rows.step, n, size, tile.room());
      const Gathered values(static_cast<const S*>(rows.v) + from, rows.step, n, size,
                            tile.room() + kPieceKeys * size);
      tile.attend(keys.rows, keys.step, values.rows, values.step, n, visible);
    }
    row = last;
  }
}

// Called by all members of a region.
template <typename S>
void attend(Member& member, const Documents& rows, const Cache<S>& cache, float scale) {
  const int64_t size = cache.head_size, heads_per_kv = rows.heads / cache.kv_heads;
  Tile tile(size);
  member.take(rows.tiles * rows.heads, [&](int64_t place) {
    const int64_t i = place / rows.heads, head = place % rows.heads;
    const int64_t kv_head = head / heads_per_kv, first = rows.first_rows[i];
    const int64_t prefix = rows.prefix_lengths[i];
    alignas(64) int32_t limits[kTileRows];
    std::fill(limits, limits + kTileRows, static_cast<int32_t>(prefix));
    const S* queries = static_cast<const S*>(rows.q) + first * rows.step + head * size;
    S* out = static_cast<S*>(rows.out) + (first * rows.heads + head) * size;
    attend_apart(rows.counts[i], [&](int64_t from, int64_t n) {
      const int64_t row = first + from;
      tile.begin(queries + from * rows.step, rows.step, n, scale);
      attend_paged(tile, cache, rows.tables + rows.table_starts[i], kv_head, prefix, limits);
      attend_documents<S>(tile, rows, size, row, row + n, kv_head * size);
      return tile.finish(out + from * rows.heads * size, rows.heads * size);
    });
  });
}

}  // namespace nightjar
