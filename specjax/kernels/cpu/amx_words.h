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

// Walks along the groups of a row, a tile of inputs at a time; after `end` all is zero.
struct Walk {
  const TallRows& w;
  int64_t row, at, end, group, left;

  Walk(const TallRows& w, int64_t row, int64_t k, int64_t end)
      : w(w), row(row * w.groups), at(k), end(end), group(k / w.group), left((group + 1) * w.group - k) {}

  // The numbers for which the 16 codes of the next tile stand, by `inverse`, as 32 bits.
  ALWAYS_INLINE __m512i Next(float inverse) {
    const Vec codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (at >= end) return _mm512_setzero_si512();
    const float zero = w.zeros == nullptr ? kMiddle : w.zeros[row + group];
    const Vec value = (codes - zero) * (w.scales[row + group] * inverse);
    at += kTile;
    if ((left -= kTile) <= 0) ++group, left += w.group;
    return _mm512_maskz_cvtps_epi32(-1, value);
  }
};

// The numbers k ... k + deep - 1 of row r as `high` and `low` bytes of 16 bits, filled up with zeros to
// whole tiles; returns their scale. A group has 16 numbers: their bytes are looked up.
inline float OpenRow(const TallRows& w, int64_t r, int64_t k, int64_t deep, int8_t* high, int8_t* low) {
  const uint8_t* from = w.values + r * w.bytes + k / 2;
  const int64_t begin = r * w.groups + k / w.group, end = r * w.groups + (k + deep - 1) / w.group + 1;
  __m512i all = _mm512_setzero_si512();  // as bits, so that NaN is the greatest
  for (int64_t g = begin; g < end; g += kLanes) {
    const __mmask16 held = end - g >= kLanes ? 0xffff : (1u << (end - g)) - 1;
    const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(held, w.scales + g));
    all = _mm512_max_epu32(all, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  uint32_t most = _mm512_reduce_max_epu32(all);
  float largest;
  std::memcpy(&largest, &most, sizeof most);
  largest *= w.zeros == nullptr ? kMiddle : kMore;
  std::memcpy(&most, &largest, sizeof most);
  const Rounding rounding(most);
  const float inverse = rounding.inverse[0];
  const __m512i mask = _mm512_set1_epi8(15);
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  const __m512i of_tiles = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  Walk walk(w, r, k, k + deep);
  for (int64_t i = 0; i < deep; i += 2 * kBytes) {
    // 16 numbers of each of four tiles: packed, four of each tile share 16 bytes
    const __m512i a = walk.Next(inverse), b = walk.Next(inverse);
    const __m512i c = walk.Next(inverse), d = walk.Next(inverse);
    const __m512i ab = _mm512_packs_epi32(a, b), cd = _mm512_packs_epi32(c, d);
    const auto lower = [](__m512i v) { return _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8); };
    const auto upper = [&](__m512i v) { return _mm512_srai_epi16(_mm512_sub_epi16(v, lower(v)), 8); };
    const __m512i of_high = _mm512_permutexvar_epi32(of_tiles, _mm512_packs_epi16(upper(ab), upper(cd)));
    const __m512i of_low = _mm512_permutexvar_epi32(of_tiles, _mm512_packs_epi16(lower(ab), lower(cd)));
    const int64_t left = (deep - i) / 2;
    const __mmask64 held = left >= kBytes ? ~0ull : (1ull << left) - 1;
    const __m512i both = _mm512_maskz_loadu_epi8(held, from + i / 2);
    const __m512i even = _mm512_and_si512(both, mask);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    const auto look = [&](__m512i bytes, int8_t* to) {
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

constexpr int64_t kWordRows = 16;  // at a time: what they are opened to stays in the L1 cache
// Bytes from one opened row to the next. Rows that were multiples of 1 KiB would share few of its lines.
constexpr int64_t kWordPitch = kDeep + kBytes;

// Sums [2 parts, 2 groups, 16 rows, 16 columns], of high bytes and of high with low ones, that wait to be
// scaled and put, or added, to y, which is done while the next ones are made.
struct WordsWaiting {
  const int32_t* sums;
  const float* scales;  // of the rows
  Vec by[2];            // scales of the columns
  float* y;
  int64_t pitch, rows;
  bool two, add;

  ALWAYS_INLINE static Vec Product(const int32_t* sums, Vec scale) {
    constexpr int64_t kMiddleSums = 2 * kWordRows * kLanes;
    const Vec high = Floats(_mm512_load_si512(sums)), middle = Floats(_mm512_load_si512(sums + kMiddleSums));
    return Once(Fma(high, Vec{} + 65536.0f, middle * 256.0f) * scale);  // before it is added
  }
  ALWAYS_INLINE void Next() {
    const Vec first = Product(sums, *scales * by[0]);
    Store(y, add ? Load(y) + first : first);
    if (two) {
      const Vec second = Product(sums + kWordRows * kLanes, *scales * by[1]);
      Store(y + kLanes, add ? Load(y + kLanes) + second : second);
    }
    sums += kLanes, ++scales, y += pitch, --rows;
  }
  void Finish() {
    while (rows > 0) Next();
  }
};

// The sums of opened rows with one or two groups of columns over a block, of which the low bytes of the
// rows are kWordRows rows further. Tiles 0 and 1 are sums of high bytes, 2 and 3 of high with low ones; 4
// and 5 are high and low bytes of rows, 6 and 7 of columns.
template <bool kTwo>
WITH_TILES void WordSums(const int8_t* opened, int64_t deep, const int32_t* first, const int32_t* second,
                         int64_t low, WordsWaiting before, int32_t* sums) {
  constexpr int64_t kTile = kWordRows * kLanes;
  TILE_ZERO(0);
  TILE_ZERO(2);
  if constexpr (kTwo) {
    TILE_ZERO(1);
    TILE_ZERO(3);
  }
  for (int64_t k = 0; k < deep; k += kBytes) {
    const int64_t at = k * (kLanes / 4);
    TILE_STREAM(6, first + at, 4 * kLanes);
    TILE_LOAD(4, opened + k, kWordPitch);
    TILE_SIGNED(0, 4, 6);
    TILE_LOAD(5, opened + kWordRows * kWordPitch + k, kWordPitch);
    TILE_SIGNED(2, 5, 6);
    TILE_STREAM(7, first + low + at, 4 * kLanes);
    TILE_SIGNED(2, 4, 7);
    if (before.rows > 0) before.Next();
    if constexpr (kTwo) {
      TILE_STREAM(6, second + at, 4 * kLanes);
      TILE_SIGNED(1, 4, 6);
      TILE_SIGNED(3, 5, 6);
      TILE_STREAM(7, second + low + at, 4 * kLanes);
      TILE_SIGNED(3, 4, 7);
      if (before.rows > 0) before.Next();
    }
  }
  before.Finish();
  TILE_STORE(0, sums, 4 * kLanes);
  TILE_STORE(2, sums + 2 * kTile, 4 * kLanes);
  if constexpr (kTwo) {
    TILE_STORE(1, sums + kTile, 4 * kLanes);
    TILE_STORE(3, sums + 3 * kTile, 4 * kLanes);
  }
}

// Memory that is fetched into the L2 cache in `calls` parts, while others are multiplied.
struct Ahead {
  const char *at, *end;
  int64_t part;

  Ahead(const void* p, int64_t bytes, int64_t calls)
      : at(static_cast<const char*>(p)), end(at + bytes), part((bytes / kLine + calls) / calls * kLine) {}
  void Fetch() {
    const char* stop = std::min(end, at + part);
    for (; at < stop; at += kLine) __builtin_prefetch(at, 0, 2);
  }
};

// The products of rows in four bits with columns, as 16 bits; to.down or to.across is 1.
WITH_TILES inline void WordProducts(const TallRows& w, const ManyColumns& x, float* y, To to) {
  alignas(64) int32_t sums[2][4 * kWordRows * kLanes];
  alignas(64) float scales[2][kWordRows], made[kWordRows * kLanes];
  int8_t* opened = reinterpret_cast<int8_t*>(Scratch(1, 2 * kWordRows * kWordPitch / 4));
  const int64_t calls = x.Blocks() * ((x.Groups() + 1) / 2);
  int64_t configured = 0, turn = 0, block = 0;
  WordsWaiting waiting{};
  for (int64_t begin = 0; begin < w.rows; begin += kWordRows) {
    const int64_t rows = std::min(kWordRows, w.rows - begin);
    if (rows != configured) {
      TileConfig config;
      for (int t = 0; t < 8; ++t) config.rows[t] = t < 6 ? rows : kLanes, config.bytes[t] = 4 * kLanes;
      TILES_AS(config);
      configured = rows;
    }
    const TallRows some = w.From(begin, rows);
    Ahead values(some.values + rows * w.bytes, kWordRows * w.bytes, calls);
    Ahead factors(some.scales + rows * w.groups, kWordRows * w.groups * sizeof(float), calls);
    To where = to;
    for (int64_t k = 0; k < x.in; k += kDeep, where.add = true, block ^= 1) {
      const int64_t deep = std::min(x.in - k, kDeep), low = ManyColumns::Steps(deep) * kLanes;
      for (int64_t r = 0; r < rows; ++r) {
        int8_t* high = opened + r * kWordPitch;
        scales[block][r] = OpenRow(some, r, k, deep, high, high + kWordRows * kWordPitch);
      }
      for (int64_t group = 0; group < x.Groups(); group += 2, turn ^= 1) {
        values.Fetch(), factors.Fetch();
        const bool two = group + 1 < x.Groups();
        const int64_t other = two ? group + 1 : group, first = group * kLanes;
        (two ? &WordSums<true> : &WordSums<false>)(opened, deep, x.Words(group, k), x.Words(other, k), low,
                                                   waiting, sums[turn]);
        float* at = y + begin * to.down + first * to.across;
        const int64_t few = std::min<int64_t>(2 * kLanes, x.columns - first);
        const Vec by[2] = {Load(x.Scales(group, k)), Load(x.Scales(other, k))};
        waiting = {sums[turn], scales[block], {by[0], by[1]}, at, to.down, rows, two, where.add};
        if (to.across == 1 && few % kLanes == 0) continue;
        waiting.y = made, waiting.pitch = kLanes, waiting.add = false;
        for (const bool second : {false, true}) {
          if (second && !two) continue;
          WordsWaiting one = waiting;
          one.two = false;
          if (second) one.sums += kWordRows * kLanes, one.by[0] = by[1];
          one.Finish();
          const int64_t held = std::min<int64_t>(kLanes, few - (second ? kLanes : 0));
          PutLow(made, rows, held, at + (second ? kLanes * to.across : 0), where);
        }
        waiting = {};
      }
    }
  }
  waiting.Finish();
  TILES_FREE();
}

#endif

}  // namespace

#endif  // SPECJAX_AMX_WORDS_H_
