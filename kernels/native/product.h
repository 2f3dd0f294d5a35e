// Shared by products of rows with packed weights of any kind: how the work is cut into tiles, in
// which order they are computed, and what is prefetched meanwhile.
//
// A weight lies in panels of neighbouring output channels, whole inputs of each; the rows of a tile
// lie interleaved, a run of each in turn: one pointer finds the operands of a step, and both come from
// memory in one stream.
#pragma once

#include <cstdlib>
#include <memory>

#include "activation.h"
#include "norm.h"
#include "team.h"
#include "tile_registers.h"

namespace nightjar {

constexpr int64_t kShares = 16;        // of a product's work for each thread, if it is enough
constexpr int64_t kLeastTiles = 8;     // of a block: each block reads all weights again
constexpr int64_t kAheadBytes = 1024;  // of a panel, prefetched into the nearest cache
constexpr int64_t kRowsAtOnce = 512;   // more are computed in turn, in the same room

// Neighbouring numbers of a row that lie together in a tile, as many as a tile register's row holds.
template <typename S>
constexpr int kRun = kLine / static_cast<int>(sizeof(S));

// How rows are cut into tiles of nearly equal height, none above `tallest`: the first `higher` ones
// have a row more.
struct Tiles {
  int64_t count;
  int64_t least;
  int64_t higher;

  Tiles(int64_t n_rows, int64_t tallest)
      : count((n_rows + tallest - 1) / tallest),
        least(n_rows / count),
        higher(n_rows % count) {}
  int64_t first_row(int64_t tile) const { return tile * least + std::min(tile, higher); }
  int64_t height(int64_t tile) const { return least + (tile < higher); }
  int64_t tile_of(int64_t row) const {
    const int64_t in_higher = higher * (least + 1);
    return row < in_higher ? row / (least + 1) : higher + (row - in_higher) / least;
  }
};

// Where a weight's panels lie, one after another.  bytes: of a panel; step_bytes: of what a step of
// the innermost loop reads of it.
struct Panels {
  const void* data;
  int64_t count;
  int64_t bytes;
  int64_t step_bytes;
};

// What to prefetch while a tile is computed: its share of the next panel, `step` bytes at a time.
struct Ahead {
  const char* from;
  int64_t step;

  void fetch() {
    for (const char* line = from; line < from + step; line += kLine) __builtin_prefetch(line, 0, 2);
    from += step;
  }
};

// compute(tile, panel, ahead) for all of both.  that_stay: tiles whose rows stay in a core's cache
// over all panels.  Called by all members of a region.
template <typename Compute>
void take_tiles(Member& member, const Tiles& cut, const Panels& panels, int64_t that_stay,
                Compute compute) {
  const int64_t shares = kShares * member.size();
  const int64_t shared = std::max(kLeastTiles, cut.count * panels.count / shares);
  const int64_t in_block = std::min(std::max<int64_t>(1, that_stay), shared);
  const int64_t n_blocks = (cut.count + in_block - 1) / in_block;
  member.take(n_blocks * panels.count, [&](int64_t place) {
    const int64_t block = place / panels.count, panel = place % panels.count;
    const int64_t begin = block * in_block, end = std::min(cut.count, begin + in_block);
    const char* next = static_cast<const char*>(panels.data) +
                       (panel + 1) % panels.count * panels.bytes;
    const int64_t step = panels.step_bytes / (end - begin);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t read = (tile - begin) * step * (panels.bytes / panels.step_bytes);
      compute(tile, panel, Ahead{next + read, step});
    }
  });
}

// Room that the calling thread keeps for its next product: for rows as a product reads them, for those
// between two products, for what products of low rank keep of rows, and for rows that it alone reads.
enum RoomFor { kRows, kInner, kLowRankRows, kOwnRows, kRooms };

inline void* room_for(RoomFor place, int64_t bytes) {
  struct Room {
    std::unique_ptr<void, decltype(&std::free)> data{nullptr, std::free};
    int64_t bytes = 0;
  };
  static thread_local Room rooms[kRooms];
  Room& room = rooms[place];
  if (room.bytes < bytes) {
    room.bytes = (bytes + kLine - 1) / kLine * kLine;
    room.data.reset(std::aligned_alloc(kLine, room.bytes));
    if (room.data == nullptr) std::abort();  // Linux reports it at the first access, if at all
  }
  return room.data.get();
}

// body(first, n) for parts of at most kRowsAtOnce rows.
template <typename Body>
void in_parts(int64_t n_rows, Body body) {
  for (int64_t first = 0; first < n_rows; first += kRowsAtOnce) {
    body(first, std::min(kRowsAtOnce, n_rows - first));
  }
}

// body(row, first, height) for every row; first: of its tile.  Called by all members of a region.
template <typename Body>
void share_rows(Member& member, const Tiles& cut, Body body) {
  member.share(cut.count, [&](int64_t tile) {
    const int64_t first = cut.first_row(tile), height = cut.height(tile);
    for (int64_t row = first; row < first + height; ++row) body(row, first, height);
  });
}

inline float widened(float x) { return x; }
inline float widened(Bfloat x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

// Numbers as they lie, in FP32.
inline Vector widened(const float* numbers) { return load(numbers); }
inline Vector widened(const Half* numbers) { return load(numbers); }
inline Vector widened(const Bfloat* numbers) {
  Vector lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = widened(numbers[i]);
  return lanes;
}

// A number of the residual stream: what is stored to it is added to it.
struct Addend {
  float sum;
};

inline void store(Addend* to, Vector lanes) { store(&to->sum, load(&to->sum) + lanes); }

// What rows are made of that are read or written, as products.py says it.
enum Numbers { kFloats, kHalves, kAddends };

// Rows that are read, `stride` numbers apart.
struct RowsIn {
  const void* rows;
  int64_t numbers;
  int64_t stride;
};

// Rows that are written one after another.
struct RowsOut {
  void* rows;
  int64_t numbers;
};

// use(rows as an array of their numbers)
template <typename Use>
void with_rows(const RowsIn& in, Use use) {
  if (in.numbers == kHalves) return use(static_cast<const Half*>(in.rows));
  use(static_cast<const float*>(in.rows));
}

template <typename Use>
void with_rows(const RowsOut& out, Use use) {
  switch (out.numbers) {
    case kHalves: return use(static_cast<Half*>(out.rows));
    case kAddends: return use(static_cast<Addend*>(out.rows));
    default: use(static_cast<float*>(out.rows));
  }
}

// What a region's products find room in, one after another; the caller of the region keeps it.
// stride: numbers of their longest rows; inner: numbers between a feed-forward block's two products.
template <typename W>
struct RoomOf;

template <typename W>
RoomOf<W> room_of(int64_t n_rows, int64_t stride, int64_t inner) {
  return RoomOf<W>::keep(std::min(n_rows, kRowsAtOnce), stride, inner);
}

// Stores the first `width` lanes, at most all of them.
template <typename Out>
inline void store_lanes(Out* to, Vector lanes, int64_t width) {
  if (width >= kLanes) {
    store(to, lanes);
  } else if (width > 0) {
    alignas(64) Out part[kLanes] = {};
    std::memcpy(part, to, width * sizeof(Out));
    store(part, lanes);
    std::memcpy(to, part, width * sizeof(Out));
  }
}

}  // namespace nightjar
