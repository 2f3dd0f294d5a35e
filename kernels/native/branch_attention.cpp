// Attention of documents to their own rows and to the cached keys of the prefix before them.

#include "attention.h"
#include "team.h"

namespace nightjar {
namespace {

// Document rows: queries, keys and values, `step` floats from row to row.
struct Rows {
  const float* q;
  const float* k;
  const float* v;
  int64_t step;
  int64_t heads;
  const int64_t* documents;
};

struct Tiles {
  int64_t count;
  const int64_t* first_rows;
  const int64_t* counts;
  const int64_t* table_starts;
  const int64_t* prefix_lengths;
};

// Attend to the documents that rows [first, end) belong to, each in pieces from its own beginning.
void attend_documents(Tile& tile, const Rows& rows, int64_t first, int64_t end, int64_t place) {
  alignas(64) int32_t visible[kTileRows];
  for (int64_t row = first; row < end;) {
    const int64_t document = rows.documents[row];
    int64_t last = row;
    while (last < end && rows.documents[last] == document) ++last;
    for (int64_t start = document; start < last; start += kPieceKeys) {
      for (int r = 0; r < kTileRows; ++r) {
        const bool own = first + r >= row && first + r < last;
        visible[r] = own ? static_cast<int32_t>(first + r + 1 - start) : 0;
      }
      const int64_t from = start * rows.step + place;
      tile.attend(rows.k + from, rows.step, rows.v + from, rows.step,
                  std::min<int64_t>(kPieceKeys, last - start), visible);
    }
    row = last;
  }
}

template <typename S>
void branch(const Rows& rows, const Cache<S>& cache, const int64_t* tables, const Tiles& tiles,
            float scale, float* out) {
  const int64_t size = cache.head_size, heads_per_kv = rows.heads / cache.kv_heads;
  parallel([&](Member& member) {
    Tile tile(size);
    member.take(tiles.count * rows.heads, [&](int64_t place) {
      const int64_t i = place / rows.heads, head = place % rows.heads;
      const int64_t kv_head = head / heads_per_kv, first = tiles.first_rows[i];
      const int64_t prefix = tiles.prefix_lengths[i];
      alignas(64) int32_t limits[kTileRows];
      std::fill(limits, limits + kTileRows, static_cast<int32_t>(prefix));
      tile.begin(rows.q + first * rows.step + head * size, rows.step, tiles.counts[i], scale);
      attend_paged(tile, cache, tables + tiles.table_starts[i], kv_head, prefix, limits);
      attend_documents(tile, rows, first, first + tiles.counts[i], kv_head * size);
      tile.finish(out + (first * rows.heads + head) * size, rows.heads * size);
    });
  });
}

}  // namespace
}  // namespace nightjar

using namespace nightjar;

// q: float[rows, heads, head_size]; k, v: float[rows, kv_heads, head_size], the documents' own; all
// with rows `step` floats apart.  keys, values: float, or binary16 if `half`.  Tile i is rows
// [first_rows[i], first_rows[i] + counts[i]), all after one prefix: prefix_lengths[i] cached tokens,
// whose block table begins at tables[table_starts[i]].  documents: int64[rows], the first row of
// each row's document.  out: float[rows, heads, head_size], contiguous.
extern "C" void branch_attention(const float* q, const float* k, const float* v, int64_t step,
                                 int64_t heads, const void* keys, const void* values, int64_t half,
                                 int64_t kv_heads, int64_t block_size, int64_t head_size,
                                 const int64_t* tables, int64_t tiles, const int64_t* first_rows,
                                 const int64_t* counts, const int64_t* table_starts,
                                 const int64_t* prefix_lengths, const int64_t* documents,
                                 float scale, float* out) {
  const Rows rows{q, k, v, step, heads, documents};
  const Tiles all{tiles, first_rows, counts, table_starts, prefix_lengths};
  with_cache(keys, values, half, kv_heads, block_size, head_size, [&](const auto& cache) {
    branch(rows, cache, tables, all, scale, out);
  });
}
