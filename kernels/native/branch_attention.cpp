// Attention of documents to their own rows and to the cached keys of the prefix before them.

#include "attention.h"

using namespace nightjar;

// q: float[rows, heads, head_size]; k, v: float[rows, kv_heads, head_size], the documents' own; all
// with rows `step` floats apart.  Tile i is rows [first_rows[i], first_rows[i] + counts[i]), all
// after one prefix: prefix_lengths[i] cached tokens, whose block table begins at
// tables[table_starts[i]].  documents: int64[rows], the first row of each row's document.
// out: float[rows, heads, head_size], contiguous.
extern "C" void branch_attention(const float* q, const float* k, const float* v, int64_t step,
                                 int64_t heads, const float* keys, const float* values,
                                 int64_t kv_heads, int64_t block_size, int64_t head_size,
                                 const int64_t* tables, int64_t tiles, const int64_t* first_rows,
                                 const int64_t* counts, const int64_t* table_starts,
                                 const int64_t* prefix_lengths, const int64_t* documents,
                                 float scale, float* out) {
  const Cache cache{keys, values, kv_heads, block_size, head_size};
  const int64_t heads_per_kv = heads / kv_heads;
#pragma omp parallel
  {
    Tile tile(head_size);
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t i = 0; i < tiles; ++i) {
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t kv_head = head / heads_per_kv, first = first_rows[i];
        const int64_t end = first + counts[i];
        alignas(64) int32_t visible[kTileRows];
        std::fill(visible, visible + kTileRows, static_cast<int32_t>(prefix_lengths[i]));
        tile.begin(q + first * step + head * head_size, step, counts[i], scale);
        attend_paged(tile, cache, tables + table_starts[i], kv_head, prefix_lengths[i], visible);
        // The documents that the tile touches, each in pieces from its own beginning.
        for (int64_t row = first; row < end;) {
          const int64_t document = documents[row];
          int64_t last = row;
          while (last < end && documents[last] == document) ++last;
          for (int64_t start = document; start < last; start += kPieceKeys) {
            for (int r = 0; r < kTileRows; ++r) {
              const bool own = first + r >= row && first + r < last;
              visible[r] = own ? static_cast<int32_t>(first + r + 1 - start) : 0;
            }
            const int64_t place = start * step + kv_head * head_size;
            tile.attend(k + place, step, v + place, step,
                        std::min<int64_t>(kPieceKeys, last - start), visible);
          }
          row = last;
        }
        tile.finish(out + (first * heads + head) * head_size, heads * head_size);
      }
    }
  }
}
