// Blocks of the decoder whose weights are int8.

#include "blocks.h"
#include "int8_product.h"

// Whether this build can multiply bytes: the processor adds four products to an int32 at once, and Linux
// grants the tile registers that it was built for.
extern "C" int int8_linear_works() {
#if defined(__AVX512VNNI__)
  return nightjar::may_use_tile_registers();
#else
  return 0;
#endif
}

#if defined(__AVX512VNNI__)

NIGHTJAR_BLOCKS(int8, nightjar::Weight)

#endif
