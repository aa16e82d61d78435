// A matrix of numbers in registers, turned.

#ifndef SPECJAX_TURN_H_
#define SPECJAX_TURN_H_

#include "vectors.h"

namespace {

#if defined(__AVX512F__)

// Turns 16 rows of 16 numbers into columns.
ALWAYS_INLINE void Turn(__m512i* r) {
  __m512i t[16];
  UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  UNROLL
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(a, c, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  UNROLL
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

#endif

}  // namespace

#endif  // SPECJAX_TURN_H_
