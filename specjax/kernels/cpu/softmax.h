// Weights of a softmax whose bits do not depend on when its maximum was found.

#ifndef SPECJAX_SOFTMAX_H_
#define SPECJAX_SOFTMAX_H_

#include "vectors.h"

namespace {

// Scores are in units of log 2, and the running maximum is a whole number n: weights are 2^(t - n).
// What was summed before a greater maximum came is multiplied by a power of two, which is exact, so
// that a sum over slots has the same bits however the slots are divided into blocks (but for weights
// below 2^-100 of the greatest, which are left out where the greater maximum is known already).
constexpr float kLog2E = 1.44269504088896341f;  // nats to units of log 2
constexpr float kHidden = -__builtin_inff();  // the score of what a node may not see: weight zero
constexpr float kFloor = -1e30f;              // n where nothing was seen
constexpr float kLeast = -100;                // weights below 2^-100 are zero

// a where either is no number: the running maximum stays one, and Weights passes NaN on.
inline Vec Max(Vec a, Vec b) { return a < b ? b : a; }

// The nearest whole number; of what is beyond 2^22 a whole number near it.
inline Vec Round(Vec t) {
  const Vec middle = All(12582912.0f);
  return (t + middle) - middle;
}

// 2^x of whole numbers x <= 0.
inline Vec Power(Vec x) {
  const IntVec dead = x < All(kLeast);
  const IntVec bits = (__builtin_convertvector(dead ? Vec{} : x, IntVec) + 127) << 23;
  return dead ? Vec{} : reinterpret_cast<const Vec&>(bits);
}

// p 2^x of whole numbers x <= 0.
inline Vec Scaled(Vec p, Vec x) {
#if defined(__AVX512F__)
  const __mmask16 alive = _mm512_cmp_ps_mask(x, All(kLeast), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(alive, p, x);
#else
  return x < All(kLeast) ? Vec{} : p * Power(x);
#endif
}

// f, which may be no number, or the nearest of -1 and 1.
inline Vec Clamped(Vec f) {
  const Vec one = All(1.0f);
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(-1, one, _mm512_maskz_max_ps(-1, -one, f));
#else
  return f < -one ? -one : f > one ? one : f;
#endif
}

// 2^f of f between -1/2 and 1/2, relative error below 2e-7 (Cephes).
inline Vec Fraction(Vec f) {
  Vec p = Fma(All(1.535336188e-4f), f, All(1.339887440e-3f));
  p = Fma(p, f, All(9.618437357e-3f));
  p = Fma(p, f, All(5.550332471e-2f));
  p = Fma(p, f, All(2.402264791e-1f));
  p = Fma(p, f, All(6.931472029e-1f));
  return Fma(p, f, All(1.0f));
}

// 2^(t - n).
inline Vec Weights(Vec t, Vec n) {
  const Vec whole = Round(t), f = Clamped(t - whole);  // within a half, unless t is beyond 2^22
  return Scaled(Fraction(f), whole - n);
}

// x where `seen` is true, and kHidden elsewhere.
inline Vec Seen(const bool* seen, Vec x) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(seen));
  return _mm512_mask_mov_ps(All(kHidden), _mm_test_epi8_mask(bytes, bytes), x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = seen[i] ? x[i] : kHidden;
  return x;
#endif
}

}  // namespace

#endif  // SPECJAX_SOFTMAX_H_
