// Registers of 16 rows of 64 bytes that some processors multiply at once (Intel's AMX).
#pragma once

#include "common.h"

#if defined(__linux__) && defined(__AVX512BF16__) && defined(__AMX_BF16__)
#define NIGHTJAR_TILE_REGISTERS 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define NIGHTJAR_TILE_REGISTERS 0
#endif

namespace nightjar {

constexpr int kRegisterRows = 16;

// What a thread sets up before it multiplies numbers that are stored as S: nothing, for most.
template <typename S>
struct TileRegisters {
  void set_up(int64_t) {}
};

#if NIGHTJAR_TILE_REGISTERS

// Registers 0 to 2 for sums and 3 for rows, `height` of each; 4 to 6 for weights.
template <>
class TileRegisters<Bfloat> {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (height_ != 0) _tile_release();
  }

  void set_up(int64_t height) {
    if (height == height_) return;
    height_ = height;
    Layout layout;
    for (int i = 0; i < 7; ++i) {
      layout.row_bytes[i] = kLine;
      layout.rows[i] = static_cast<uint8_t>(i < 4 ? height : kRegisterRows);
    }
    _tile_loadconfig(&layout);
  }

 private:
  // As the instruction reads it (Intel's manual, volume 1, 18.3).
  struct alignas(64) Layout {
    uint8_t palette = 1;
    uint8_t first_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  int64_t height_ = 0;
};

// Asks Linux for this process's use of the registers: without it the first instruction kills it.
inline bool may_use_tile_registers() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return granted;
}

#else

inline bool may_use_tile_registers() { return true; }

#endif

}  // namespace nightjar
