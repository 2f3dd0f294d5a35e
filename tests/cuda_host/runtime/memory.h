// The memory a launch may touch, and what was done to each byte of it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <unordered_map>
#include <vector>

#include "clock.h"
#include "findings.h"

namespace cuda_host {

enum class Space : uint32_t {
  kBuffer,
  kShared,
  kVariable,
  kCompiler,  // what the compiler keeps for itself: not checked
};

// The layout is written by the driver (module.py): change both.
struct Region {
  uint64_t address;
  uint64_t bytes;
  Space space;
  uint32_t read_only;
};

// One kind of access to some bytes of a word by lanes of one warp at one time.
struct Access {
  const void* place;
  uint32_t block;
  uint32_t epoch;
  uint32_t warp;
  uint32_t time;
  uint32_t lanes;
  uint8_t bytes;  // of the word: bit i is byte i
  Action action;
  uint32_t next;  // the word's next access; 0 ends
};

class Memory {
 public:
  void begin_launch(const Region* regions, uint32_t count);
  // Shared memory of a new block: poisoned, nothing written, nobody there before.
  void begin_block();

  // Checks one access of the running thread. Stops the launch where the access must not happen.
  void check(uint64_t address, uint32_t bytes, Action action, const void* place);

  // Stops the launch where memory is not there, as for a read.
  void require(uint64_t address, uint32_t bytes, const void* place);

  // An atomic of the running thread passes on and takes what was published at this address.
  void synchronise(uint64_t address);

 private:
  struct Shadow {
    Region region;
    int32_t number;
    bool touched;                 // by the block that runs
    std::vector<uint32_t> words;   // first access of each 4 bytes, 0: none
    std::vector<uint8_t> written;  // shared memory alone: of each word, bit i is byte i
  };

  Shadow* find(uint64_t address, uint32_t bytes);
  const Shadow* nearest(uint64_t address) const;
  [[noreturn]] void refuse(Kind kind, const Shadow* shadow, uint64_t address, uint32_t bytes,
                           Action action, const void* place);
  void check_word(Shadow& shadow, uint64_t word, uint8_t bytes, Action action, const void* place);
  void check_initialised(Shadow& shadow, uint64_t word, uint8_t bytes, Action action,
                         const void* place);
  void check_races(Shadow& shadow, uint64_t word, uint8_t bytes, Action action, const void* place);
  void report_race(const Shadow& shadow, uint64_t word, const Access& earlier, uint32_t lanes,
                   uint8_t bytes, Action action, const void* place) const;
  uint32_t remember(uint8_t bytes, Action action, const void* place, uint32_t next);
  void forget(uint32_t& link);

  std::vector<Shadow> shadows_;
  Shadow* latest_ = nullptr;
  std::vector<Access> accesses_;
  uint32_t free_ = 0;
  std::unordered_map<uint64_t, SharedClock> published_;
};

extern Memory memory;

}  // namespace cuda_host
