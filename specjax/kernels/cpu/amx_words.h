// Products of rows of weights in four bits with the columns of a prompt by tiles of bytes (AMX).
//
// A tile of 32 inputs must be scaled before the next one is added to it, which takes longer than its
// product. With many columns it is cheaper to round the scaled weights of a row to 16 bits, as the
// columns are, with one scale for every kDeep inputs. Two numbers 256 high + low have four products of
// bytes: three are summed, and that of the low bytes, below 2^-16 of the greatest, is left out.

#ifndef SPECJAX_AMX_WORDS_H_
#define SPECJAX_AMX_WORDS_H_

#include "amx_bytes.h"

namespace {

constexpr int64_t kWordColumns = 33;  // products with fewer have the same bits however many there are

#if defined(SPECJAX_BYTE_DOTS) && defined(SPECJAX_TILES)

// The numbers k ... k + deep - 1 of row r as `high` and `low` bytes of 16 bits, filled up with zeros to
// whole tiles; returns their scale. A group has 16 numbers: their bytes are looked up.
inline float OpenRow(const TallRows& w, int64_t r, int64_t k, int64_t deep, int8_t* high, int8_t* low) {
  const float* scales = w.scales + r * w.groups;
  const uint8_t* from = w.values + r * w.bytes + k / 2;
  uint32_t most = 0;  // as bits, so that NaN is the greatest
  for (int64_t g = k / w.group; g <= (k + deep - 1) / w.group; ++g) {
    uint32_t bits;
    std::memcpy(&bits, scales + g, sizeof bits);
    most = std::max(most, bits & 0x7fffffff);
  }
  float largest;
  std::memcpy(&largest, &most, sizeof most);
  largest *= w.zeros == nullptr ? kMiddle : kMore;
  std::memcpy(&most, &largest, sizeof most);
  const Rounding rounding(most);
  const Vec codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  alignas(64) int8_t of_high[kBytes] = {}, of_low[kBytes] = {};  // of the four tiles of 128 inputs
  for (int64_t i = 0; i < deep; i += 2 * kBytes) {
    for (int64_t t = 0; t < 4 && i + t * kTile < deep; ++t) {
      const int64_t g = (k + i + t * kTile) / w.group;
      const float zero = w.zeros == nullptr ? kMiddle : w.zeros[r * w.groups + g];
      const Vec value = (codes - zero) * (scales[g] * rounding.inverse);
      const HighLow number(rounding.some ? _mm512_cvtps_epi32(value) : _mm512_setzero_si512());
      const auto put = [t](int8_t* to, __m512i bytes) {
        _mm_store_si128(reinterpret_cast<__m128i*>(to) + t, _mm512_cvtepi32_epi8(bytes));
      };
      put(of_high, number.high);
      put(of_low, number.low);
    }
    const int64_t left = (deep - i) / 2;
    const __mmask64 held = left >= kBytes ? ~0ull : (1ull << left) - 1;
    const __m512i both = _mm512_maskz_loadu_epi8(held, from + i / 2);
    const __m512i even = _mm512_and_si512(both, mask);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    const auto look = [&](const int8_t* table, int8_t* to) {
      const __m512i bytes = _mm512_load_si512(table);
      const __m512i x = _mm512_maskz_shuffle_epi8(held, bytes, even);
      const __m512i y = _mm512_maskz_shuffle_epi8(held, bytes, odd);
      _mm512_storeu_si512(to, _mm512_permutex2var_epi64(x, first, y));
      _mm512_storeu_si512(to + kBytes, _mm512_permutex2var_epi64(x, second, y));
    };
    look(of_high, high + i);
    look(of_low, low + i);
  }
  return rounding.scale;
}

// made [rows, kLanes]: the products of rows of 16 bits with a group of columns over a block, of which
// the low bytes of the rows are kAmxRows rows further. Tiles 0 and 1 are sums of high bytes, 2 and 3 of
// high with low ones.
template <bool kTwo>
WITH_TILES void WordRows(const Meeting& at, float* made) {
  alignas(64) int32_t sums[2][kAmxRows * kLanes];
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t k = 0; k < at.deep; k += kBytes) {
    const int8_t *high = at.values + k, *low = high + kAmxRows * kDeep;
    TILE_LOAD(6, at.high + k * (kLanes / 4), 4 * kLanes);
    TILE_LOAD(4, high, kDeep);
    TILE_SIGNED(0, 4, 6);
    TILE_LOAD(7, at.low + k * (kLanes / 4), 4 * kLanes);
    TILE_SIGNED(2, 4, 7);
    TILE_LOAD(4, low, kDeep);
    TILE_SIGNED(2, 4, 6);
    if constexpr (kTwo) {
      TILE_LOAD(5, high + kLanes * kDeep, kDeep);
      TILE_SIGNED(1, 5, 6);
      TILE_SIGNED(3, 5, 7);
      TILE_LOAD(5, low + kLanes * kDeep, kDeep);
      TILE_SIGNED(3, 5, 6);
    }
  }
  TILE_STORE(0, sums[0], 4 * kLanes);
  TILE_STORE(2, sums[1], 4 * kLanes);
  if constexpr (kTwo) {
    TILE_STORE(1, sums[0] + kLanes * kLanes, 4 * kLanes);
    TILE_STORE(3, sums[1] + kLanes * kLanes, 4 * kLanes);
  }
  for (int64_t r = 0; r < at.rows; ++r) {
    const Vec first = Floats(_mm512_load_si512(sums[0] + r * kLanes));
    const Vec second = Floats(_mm512_load_si512(sums[1] + r * kLanes));
    const Vec both = Fma(first, Vec{} + 65536.0f, second * 256.0f);
    Store(made + r * kLanes, both * (at.scales[r] * at.by));
  }
}

#endif

}  // namespace

#endif  // SPECJAX_AMX_WORDS_H_
