// Numbers in float16 (IEEE binary16), and vectors of the floats that they stand for.
//
// Processors with F16C and ARM's of 64 bits convert them by instructions; elsewhere integers do, to
// the same bits.

#ifndef SPECJAX_FLOAT16_H_
#define SPECJAX_FLOAT16_H_

#include "bfloat16.h"

namespace {

struct Float16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

inline Vec Widen(HalfVec halves) {
  return _mm512_maskz_cvtph_ps(-1, reinterpret_cast<__m256i>(halves));
}
inline HalfVec NearestFloat16(Vec x) {
  return reinterpret_cast<HalfVec>(_mm512_maskz_cvtps_ph(-1, x, kToNearest));
}
#elif defined(__F16C__)
inline Vec Widen(HalfVec halves) { return _mm256_cvtph_ps(reinterpret_cast<__m128i>(halves)); }
inline HalfVec NearestFloat16(Vec x) {
  return reinterpret_cast<HalfVec>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
inline Vec Widen(HalfVec halves) { return vcvt_f32_f16(reinterpret_cast<float16x4_t>(halves)); }
inline HalfVec NearestFloat16(Vec x) { return reinterpret_cast<HalfVec>(vcvt_f16_f32(x)); }
#else
constexpr int32_t kInfinity = 0x7f800000, kHalfInfinity = 0x7c00;
constexpr int32_t kLeastNormal = 113 << 23;  // the bits of 2^-14, float16's least normal number

inline Vec Widen(HalfVec halves) {
  const IntVec bits = __builtin_convertvector(halves, IntVec), sign = (bits & 0x8000) << 16;
  const IntVec rest = (bits & 0x7fff) << 13, normal = rest + (112 << 23);
  const IntVec least = IntVec{} + kLeastNormal, tiny = rest + kLeastNormal;
  // no float is subnormal on the way, since XLA's threads take these for zero
  const Vec small = reinterpret_cast<const Vec&>(tiny) - reinterpret_cast<const Vec&>(least);
  const IntVec by_size = rest < 1 << 23 ? reinterpret_cast<const IntVec&>(small) : normal;
  const IntVec all = (rest >= kHalfInfinity << 13 ? rest | kInfinity : by_size) | sign;
  return reinterpret_cast<const Vec&>(all);
}
inline HalfVec NearestFloat16(Vec x) {
  const IntVec bits = reinterpret_cast<const IntVec&>(x), sign = bits >> 16 & 0x8000;
  const IntVec size = bits & 0x7fffffff, even = size >> 13 & 1;
  const IntVec normal = (size + 0xfff + even - (112 << 23)) >> 13;
  const Vec half = All(0.5f), sum = reinterpret_cast<const Vec&>(size) + half;  // 2^-24 is its last bit
  const IntVec small = reinterpret_cast<const IntVec&>(sum) - reinterpret_cast<const IntVec&>(half);
  const IntVec finite = size < kLeastNormal ? small : normal;
  const IntVec great = size > kInfinity ? IntVec{} + 0x7e00 : IntVec{} + kHalfInfinity;
  return __builtin_convertvector((size >= 0x47800000 ? great : finite) | sign, HalfVec);
}
#endif

inline Vec Load(const Float16* p) { return Widen(*reinterpret_cast<const HalfVec*>(p)); }
inline float Number(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  return Widen(HalfVec{} + x.bits)[0];
#endif
}
inline void Put(float x, Float16* to) {
#if defined(__F16C__)
  to->bits = _cvtss_sh(x, 0);
#else
  to->bits = NearestFloat16(All(x))[0];
#endif
}
inline void Put(Vec x, Float16* to) { *reinterpret_cast<HalfVec*>(to) = NearestFloat16(x); }

template <>
inline Vec Rounded<Float16>(Vec x) {
  return Widen(NearestFloat16(x));
}

}  // namespace

#endif  // SPECJAX_FLOAT16_H_
