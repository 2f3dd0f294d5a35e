// How the driver calls a kernel by name: its arguments come as pointers to them, and a list of its
// parameters tells what they must be.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#include "cuda_host/qualifiers.h"

namespace cuda_host {

// Letters: i signed, u unsigned, f floating point, b bfloat16, ? bool, v void, x anything else.
struct Parameter {
  char kind;  // one of the letters, or * for a pointer; 0 ends a list
  char pointee;
  uint8_t read_only;  // a pointer to const
  uint32_t bytes;
  uint32_t pointee_bytes;
};

// half.h adds its two types.
template <class T>
constexpr char letter = std::is_void_v<T>                             ? 'v'
                        : std::is_same_v<std::remove_cv_t<T>, bool>   ? '?'
                        : std::is_floating_point_v<T>                 ? 'f'
                        : std::is_integral_v<T> && std::is_signed_v<T> ? 'i'
                        : std::is_integral_v<T>                       ? 'u'
                                                                      : 'x';

template <class T>
constexpr uint32_t bytes_of() {
  if constexpr (std::is_void_v<T>) return 1;
  else return sizeof(T);
}

template <class T>
constexpr Parameter describe() {
  if constexpr (std::is_pointer_v<T>) {
    using To = std::remove_pointer_t<T>;
    return {'*', letter<std::remove_cv_t<To>>, std::is_const_v<To>, sizeof(T), bytes_of<To>()};
  } else {
    return {letter<T>, 0, 0, sizeof(T), 0};
  }
}

template <class... Types>
const Parameter* parameters(void (*)(Types...)) {
  static const Parameter list[] = {describe<Types>()..., Parameter{}};
  return list;
}

template <class... Types, size_t... Index>
CUDA_HOST_UNSEEN void call_with(void (*kernel)(Types...), void* const* arguments,
                                std::index_sequence<Index...>) {
  kernel(*static_cast<Types*>(arguments[Index])...);
}

template <class... Types>
void call(void (*kernel)(Types...), void* const* arguments) {
  call_with(kernel, arguments, std::index_sequence_for<Types...>{});
}

}  // namespace cuda_host

#define CUDA_HOST_EXPORT extern "C" __attribute__((visibility("default")))

// Dynamic shared memory: every `extern __shared__` array is this one. 227 KiB is the most that a
// block of any GPU so far can have.
extern "C" {
inline thread_local unsigned char cuda_host_dynamic_shared[227 * 1024] __attribute__((aligned(1024), used));
}
CUDA_HOST_EXPORT inline __attribute__((used)) void* cuda_host_dynamic_shared_address() {
  return cuda_host_dynamic_shared;
}
