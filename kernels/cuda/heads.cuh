// The norm and the rotation of a head between the QKV projection and attention, by a warp.
#pragma once

#include "fp8.cuh"

// Pairs of neighbouring channels that a lane holds (loads of 4 bytes of half: a head of 64 is one
// whole line), and where they lie in the head.
template <int HEAD_SIZE>
struct Pairs {
  static_assert(HEAD_SIZE % 2 == 0, "lanes hold pairs of channels");
  static constexpr int COUNT = (HEAD_SIZE / 2 + WARP - 1) / WARP;

  __device__ static int channel(int pair) {
    return 2 * (pair * WARP + static_cast<int>(threadIdx.x) % WARP);
  }
};

// A family's norms and rotation.  query_norm, key_norm: [HEAD_SIZE], or null; cosines, sines:
// [n_positions, n_turned], or null.
struct HeadTables {
  const float *query_norm, *key_norm;
  float epsilon;
  const float *cosines, *sines;
  int64 n_positions;
  int n_turned;
};

// The rotation of a head's channels at a position: channel i rotates with channel i + n_turned.  A
// position outside the table gives NaN.
template <int HEAD_SIZE>
struct Angles {
  float cosine[Pairs<HEAD_SIZE>::COUNT][2], sine[Pairs<HEAD_SIZE>::COUNT][2];

  __device__ __forceinline__ void load(const HeadTables& tables, int64 position) {
    const bool known = position >= 0 && position < tables.n_positions;
    const int64 line = known ? position * tables.n_turned : 0;
#pragma unroll
    for (int j = 0; j < Pairs<HEAD_SIZE>::COUNT; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = Pairs<HEAD_SIZE>::channel(j) + i;
        const int angle = channel < tables.n_turned ? channel : channel - tables.n_turned;
        const bool there = known && angle < tables.n_turned;
        cosine[j][i] = there ? (tables.cosines + line)[angle] : not_a_number();
        sine[j][i] = there ? (tables.sines + line)[angle] : not_a_number();
      }
    }
  }
};

// A head in the lanes of a warp.
template <int HEAD_SIZE>
struct Head {
  float at[Pairs<HEAD_SIZE>::COUNT][2];

  template <typename T>
  __device__ __forceinline__ void load(const T* from) {
#pragma unroll
    for (int j = 0; j < Pairs<HEAD_SIZE>::COUNT; ++j) {
      const int channel = Pairs<HEAD_SIZE>::channel(j);
      at[j][0] = at[j][1] = 0.0f;
      if (channel < HEAD_SIZE) ::load<2>(from + channel, at[j]);
    }
  }

  template <typename T>
  __device__ __forceinline__ void store(T* to) const {
#pragma unroll
    for (int j = 0; j < Pairs<HEAD_SIZE>::COUNT; ++j) {
      const int channel = Pairs<HEAD_SIZE>::channel(j);
      if (channel < HEAD_SIZE) ::store<2>(to + channel, at[j]);
    }
  }

  // What storage keeps of it, times a factor.
  template <typename T>
  __device__ __forceinline__ void round_and_scale(float factor) {
#pragma unroll
    for (int j = 0; j < Pairs<HEAD_SIZE>::COUNT; ++j) {
      at[j][0] = widen(narrow<T>(at[j][0])) * factor;
      at[j][1] = widen(narrow<T>(at[j][1])) * factor;
    }
  }

  // To a row of the cache, [HEAD_SIZE].  In FP8 the head, as T keeps it, becomes what the cache keeps of
  // it; the row's exponent goes to `scale`.
  template <typename T, typename S>
  __device__ __forceinline__ void keep(S* to, Fp8* scale) {
    if constexpr (IS_FP8<S>) {
      round_and_scale<T>(1.0f);
      unsigned peak = 0;
#pragma unroll
      for (int j = 0; j < Pairs<HEAD_SIZE>::COUNT; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) peak = max(peak, __float_as_uint(at[j][i]) & 0x7fffffffu);
      }
      const int exponent = exponent_for(warp_max(peak));
#pragma unroll
      for (int j = 0; j < Pairs<HEAD_SIZE>::COUNT; ++j) {
        const int channel = Pairs<HEAD_SIZE>::channel(j);
        const Vector<Fp8, 2> codes = keep_pair(at[j], exponent);
        if (channel < HEAD_SIZE) *reinterpret_cast<Vector<Fp8, 2>*>(to + channel) = codes;
      }
      if (threadIdx.x % WARP == 0) *scale = static_cast<Fp8>(exponent);
    } else {
      store(to);
    }
  }

  // weight: [HEAD_SIZE].
  __device__ __forceinline__ void normalize(const float* weight, float epsilon) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < Pairs<HEAD_SIZE>::COUNT; ++j) {
      squares += at[j][0] * at[j][0] + at[j][1] * at[j][1];
    }
    const float inverse = 1.0f / sqrtf(warp_sum(squares) / HEAD_SIZE + epsilon);
#pragma unroll
    for (int j = 0; j < Pairs<HEAD_SIZE>::COUNT; ++j) {
      const int channel = Pairs<HEAD_SIZE>::channel(j);
      if (channel < HEAD_SIZE) {
        at[j][0] *= inverse * weight[channel];
        at[j][1] *= inverse * weight[channel + 1];
      }
    }
  }

  // whole: [HEAD_SIZE] in shared memory, the warp's own, as another lane holds the other channel; at a
  // multiple of 8 bytes.
  __device__ __forceinline__ void turn(const Angles<HEAD_SIZE>& angles, int n_turned,
                                       float* whole) {
    __syncwarp();  // the reads of the head before are over
    store(whole);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < Pairs<HEAD_SIZE>::COUNT; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = Pairs<HEAD_SIZE>::channel(j) + i;
        if (channel >= 2 * n_turned) continue;
        const bool first = channel < n_turned;
        const float other = whole[first ? channel + n_turned : channel - n_turned];
        const float turned = at[j][i] * angles.cosine[j][i], across = other * angles.sine[j][i];
        at[j][i] = first ? turned - across : turned + across;
      }
    }
  }
};
