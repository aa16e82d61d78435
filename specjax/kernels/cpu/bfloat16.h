// Numbers in bfloat16, and vectors of the floats that they stand for.

#ifndef SPECJAX_BFLOAT16_H_
#define SPECJAX_BFLOAT16_H_

#include "vectors.h"

namespace {

typedef int32_t HalfPairs __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

// A bfloat16: the upper half of a float. A Pair is one too, in a row that is read two vectors at a
// time: those at even and those at odd places, by columns that PackRows laid out alike.
struct Half {
  uint16_t bits;
};
struct Pair : Half {};

inline Vec Load(const Half* p) {
  const HalfVec half = *reinterpret_cast<const HalfVec*>(p);
#if defined(__aarch64__)  // for which compilers convert one number after the other
  return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
#else
  const IntVec bits = __builtin_convertvector(half, IntVec) << 16;
  return reinterpret_cast<const Vec&>(bits);
#endif
}
inline float Number(Half x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}


// The bits of the nearest bfloat16, the even one of two; of NaN those of a NaN.
inline IntVec Nearest(Vec x) {
  const IntVec bits = reinterpret_cast<const IntVec&>(x), upper = bits >> 16;
  return x == x ? (bits + 0x7fff + (upper & 1)) >> 16 : upper | 64;
}
inline void Put(float x, float* to) { *to = x; }
inline void Put(float x, Half* to) { to->bits = Nearest(All(x))[0]; }
inline void Put(Vec x, float* to) { Store(to, x); }
inline void Put(Vec x, Half* to) {
  *reinterpret_cast<HalfVec*>(to) = __builtin_convertvector(Nearest(x), HalfVec);
}

// What a number of type T holds of x.
template <typename T>
inline Vec Rounded(Vec x) {
  if constexpr (std::is_same_v<T, float>) return x;
  const IntVec bits = Nearest(x) << 16;
  return reinterpret_cast<const Vec&>(bits);
}

}  // namespace

#endif  // SPECJAX_BFLOAT16_H_
