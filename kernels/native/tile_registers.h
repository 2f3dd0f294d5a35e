// Registers of 16 rows of 64 bytes that some processors multiply at once (Intel's AMX).
#pragma once

#include "common.h"

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define NIGHTJAR_TILE_REGISTERS 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define NIGHTJAR_TILE_REGISTERS 0
#endif

namespace nightjar {

constexpr int kRegisterRows = 16;

#if NIGHTJAR_TILE_REGISTERS

// A thread's registers while it multiplies: those for sums, one for rows, and the others for weights.
class TileRegisters {
 public:
  // sums: how many registers hold them, or 0 if none is used.
  explicit TileRegisters(int sums) : sums_(sums) {}
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (height_ != 0) _tile_release();
  }

  // For tiles of `height` rows.
  void set_up(int64_t height) {
    if (sums_ == 0 || height == height_) return;
    height_ = height;
    Layout layout;
    for (int i = 0; i < kAll; ++i) {
      layout.row_bytes[i] = kLine;
      layout.rows[i] = static_cast<uint8_t>(i <= sums_ ? height : kRegisterRows);
    }
    _tile_loadconfig(&layout);
  }

 private:
  static constexpr int kAll = 8;

  // As the instruction reads it (Intel's manual, volume 1, 18.3).
  struct alignas(64) Layout {
    uint8_t palette = 1;
    uint8_t first_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  int sums_;
  int64_t height_ = 0;
};

// Asks Linux for this process's use of the registers: without it the first instruction kills it.
inline bool may_use_tile_registers() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

#else

struct TileRegisters {
  explicit TileRegisters(int) {}
  void set_up(int64_t) {}
};

inline bool may_use_tile_registers() { return true; }

#endif

}  // namespace nightjar
