// Columns of activations as whole numbers, for the processor's own dot products of bytes.
//
// A column is rounded to 16 bits, with one scale for every kDeep inputs (a block), and held as two
// bytes an input: 256 high + low. Rounding changes every input by about 2^-16 of the largest one of its
// block at most; where that is 1e-30 or less, all are zero. Few columns lie one after the other
// (FewColumns); many lie side by side (ManyColumns). Both hold the same numbers.

#ifndef SPECJAX_BYTE_COLUMNS_H_
#define SPECJAX_BYTE_COLUMNS_H_

#include "tasks.h"
#include "vectors.h"

#if defined(__AVX512BW__) && !defined(SPECJAX_WITHOUT_DOTS) && \
    (defined(__AVX512VNNI__) || !defined(__clang__))  // Clang's assembler knows only what it compiles for
#define SPECJAX_BYTE_DOTS
#include <cpuid.h>
#endif

namespace {

constexpr int kTile = 32;  // inputs of which four-bit values share 16 bytes: i and i + 16, low bits first

#if defined(SPECJAX_BYTE_DOTS)

inline bool HasByteDots() {
  static const bool has = [] {
    uint32_t a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
  }();
  return has;
}

constexpr int64_t kManyColumns = 17;   // from so many on, tall blocks are faster than sums over lanes
constexpr int64_t kMostColumns = 512;  // at a time: what they take is kept by the thread
constexpr int64_t kBytes = 64;         // of a vector
constexpr float kMostSixteen = 32639;  // 256 * 127 + 127

// sum += the products of bytes from 0 to 255 with signed bytes, of four neighbours a lane.
template <typename Sum>
ALWAYS_INLINE void AddDots(Sum& sum, __m512i bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(signed_bytes));
}

// Weights of four bits stand for value - zero, zeros from 0 to 16; as bytes they are kMore more, so
// that none is negative, and kMore times the sum of the inputs is taken off the products again.
constexpr int kMore = 16, kMiddle = 8;  // kMiddle: the zero of weights that have none of their own

// The zeros of `tiles`, up to four, from input k on, of a row [groups], each in the 16 bytes of a tile.
ALWAYS_INLINE __m512i TileZeros(const int8_t* zeros, int64_t group, int64_t k, int64_t tiles) {
  uint32_t four = 0;
  if (group == kTile && tiles == 4) {
    std::memcpy(&four, zeros + k / kTile, sizeof four);
  } else {
    for (int64_t t = 0; t < tiles; ++t)
      four |= uint32_t{static_cast<uint8_t>(zeros[(k + t * kTile) / group])} << 8 * t;
  }
  const IntVec each = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  return _mm512_shuffle_epi8(_mm512_set1_epi32(four), reinterpret_cast<__m512i>(each * 0x01010101));
}

ALWAYS_INLINE Vec Floats(__m512i v) { return __builtin_convertvector(reinterpret_cast<IntVec>(v), Vec); }

// How the numbers of a block become 16 bits, by their greatest magnitude as the bits of a float: what
// is not finite is above all else, and has a scale of NaN.
struct Rounding {
  float scale;
  Vec inverse;
  bool some;  // whether a number is not zero

  explicit Rounding(uint32_t bits) {
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool finite = bits < 0x7f800000;
    some = finite && largest > 1e-30f;
    scale = finite ? largest / kMostSixteen : std::nanf("");
    inverse = Vec{} + (some ? kMostSixteen / largest : 0);
  }
};

struct HighLow {
  __m512i high, low;
  explicit ALWAYS_INLINE HighLow(__m512i number)
      : low(_mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24)) {
    high = _mm512_srai_epi32(_mm512_sub_epi32(number, low), 8);
  }
};

// Columns for weights of eight bits, or of four. Each has, for every block, a block of `high` and a
// block of `low` bytes, filled up with zeros to whole units. Where weights have four bits,
// each 128 inputs begin with those that meet the low bits of weights.
struct FewColumns {
  const int8_t* bytes;
  const IntVec* sums;   // of inputs, by lanes: 128 times, of eight bits [blocks, columns], and 8
                        // times, of four bits [in / 128, columns]; weights meet x as 0 and more
  const float* scales;  // [blocks, columns]
  int64_t in, columns, unit;

  int64_t Length(int64_t inputs) const { return (inputs + unit - 1) / unit * unit; }
  // The high bytes of a column's inputs from k on; the low ones follow.
  const int8_t* At(int64_t k, int64_t column) const {
    const int64_t length = Length(std::min(in - k, kDeep));
    return bytes + 2 * (k * columns + column * length);
  }
  int64_t Index(int64_t k, int64_t column) const { return k / kDeep * columns + column; }
};

// x [in, columns] -> FewColumns, in memory of this thread; columns for four bits have memory of their own.
inline FewColumns PackFew(const float* x, int64_t in, int64_t columns, bool four) {
  const float* rows = columns == 1 ? x : PackRows(x, in, columns, false);
  const int64_t blocks = (in + kDeep - 1) / kDeep, unit = four ? 2 * kBytes : kBytes;
  const int64_t units = four ? (in + unit - 1) / unit : blocks;
  const int64_t slot = four ? 4 : 2;
  int8_t* bytes = reinterpret_cast<int8_t*>(Scratch(slot, columns * ((in + unit - 1) / unit * unit) / 2));
  float* numbers = Scratch(slot + 1, units * columns * kLanes + blocks * columns);
  IntVec* sums = reinterpret_cast<IntVec*>(numbers);
  float* scales = numbers + units * columns * kLanes;
  const FewColumns made{bytes, sums, scales, in, columns, unit};
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff), ones = _mm512_set1_epi8(1);
  for (int64_t k = 0; k < in; k += kDeep) {
    const int64_t deep = std::min(in - k, kDeep), length = made.Length(deep);
    for (int64_t m = 0; m < columns; ++m) {
      const float* from = rows + m * Pitch(in) + k;
      const auto load = [&](int64_t i) {
        const int64_t left = deep - i;
        const __mmask16 held = left >= kLanes ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
        return _mm512_maskz_loadu_ps(held, from + i);
      };
      __m512i most = _mm512_setzero_si512();
      for (int64_t i = 0; i < deep; i += kLanes)
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(load(i)), no_sign));
      const Rounding rounding(_mm512_reduce_max_epu32(most));
      scales[made.Index(k, m)] = rounding.scale;
      int8_t *high = bytes + 2 * (k * columns + m * length), *low = high + length;
      for (int64_t i = 0; i < length; i += kLanes) {
        const HighLow number(rounding.some ? _mm512_cvtps_epi32(load(i) * rounding.inverse)
                                           : _mm512_setzero_si512());
        // of 128 inputs, the first 16 of every tile in the first half
        const int64_t at = four ? i / 128 * 128 + i % 32 * 4 + i % 128 / 32 * 16 : i;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + at), _mm512_cvtepi32_epi8(number.high));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + at), _mm512_cvtepi32_epi8(number.low));
      }
      __m512i upper = _mm512_setzero_si512(), lower = upper;
      for (int64_t i = 0; i < length; i += kBytes) {
        AddDots(upper, ones, _mm512_loadu_si512(high + i));
        AddDots(lower, ones, _mm512_loadu_si512(low + i));
        if (four && i % unit != 0) {  // each tile's sum in four lanes, kMiddle times
          __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
          sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_CDAB));
          sum = _mm512_add_epi32(sum, _mm512_shuffle_epi32(sum, _MM_PERM_BADC));
          sums[(k + i) / unit * columns + m] = reinterpret_cast<IntVec>(_mm512_slli_epi32(sum, 3));
          upper = lower = _mm512_setzero_si512();
        }
      }
      if (!four) {  // weights of -128 to 127 meet the columns as 0 to 255
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
        sums[made.Index(k, m)] = reinterpret_cast<IntVec>(_mm512_slli_epi32(sum, 7));
      }
    }
  }
  return made;
}

// Columns side by side, kLanes of them in a group: for every block of inputs the high bytes, then the
// low ones, each [inputs / 4, kLanes, 4], filled up with zeros to whole tiles. In `halves` a group has
// half as many, whose high bytes lie in the lower lanes, and the low ones in the upper.
struct ManyColumns {
  int32_t* words;
  int32_t* sums;   // [groups, tiles, kLanes]: of each tile kMore times the sum of the inputs
  int32_t* parts;  // [groups, blocks, 2, kLanes]: of each block 128 times the sums of the bytes
  float* scales;   // [groups, blocks, kLanes]
  int64_t in, columns, stride;  // numbers between the inputs of a column of x
  bool halves;

  int64_t Width() const { return halves ? kLanes / 2 : kLanes; }
  int64_t Groups() const { return (columns + Width() - 1) / Width(); }
  int64_t Blocks() const { return (in + kDeep - 1) / kDeep; }
  int64_t Tiles() const { return (in + kTile - 1) / kTile; }
  static int64_t Steps(int64_t inputs) { return (inputs + kTile - 1) / kTile * (kTile / 4); }
  int32_t* Words(int64_t group, int64_t k) const {
    return words + (group * Tiles() * kTile + k) * (2 * kLanes / 4);
  }
  int32_t* Sums(int64_t group, int64_t k) const {
    return sums + (group * Tiles() + k / kTile) * kLanes;
  }
  int32_t* Parts(int64_t group, int64_t k) const {
    return parts + (group * Blocks() + k / kDeep) * 2 * kLanes;
  }
  float* Scales(int64_t group, int64_t k) const {
    return scales + (group * Blocks() + k / kDeep) * kLanes;
  }

  // A block of a group of x.
  void Pack(const float* x, int64_t group, int64_t k) const {
    const int64_t deep = std::min(in - k, kDeep), steps = Steps(deep), first = group * Width();
    const __mmask16 held = (1u << std::min(Width(), columns - first)) - 1;
    const auto load = [&](int64_t i) {
      return i < deep ? _mm512_maskz_loadu_ps(held, x + (k + i) * stride + first) : _mm512_setzero_ps();
    };
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff), byte = _mm512_set1_epi32(255);
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < deep; ++i)
      most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(load(i)), no_sign));
    alignas(64) uint32_t bits[kLanes];
    alignas(64) float inverse[kLanes];
    _mm512_store_si512(bits, most);
    __mmask16 some = 0;
    for (int m = 0; m < kLanes; ++m) {
      const Rounding rounding(bits[m]);
      Scales(group, k)[m] = rounding.scale;
      inverse[m] = rounding.inverse[0];
      some |= rounding.some << m;
    }
    const Vec by = Load(inverse);
    int32_t *high = Words(group, k), *low = high + steps * kLanes;
    const __m512i zero = _mm512_setzero_si512();
    __m512i upper = zero, lower = zero, before = zero;
    for (int64_t s = 0; s < steps; ++s) {
      __m512i h = zero, l = zero;
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const HighLow number(_mm512_maskz_cvtps_epi32(some, load(4 * s + i) * by));
        upper = _mm512_add_epi32(upper, number.high);
        lower = _mm512_add_epi32(lower, number.low);
        h = _mm512_or_si512(h, _mm512_slli_epi32(_mm512_and_si512(number.high, byte), 8 * i));
        l = _mm512_or_si512(l, _mm512_slli_epi32(_mm512_and_si512(number.low, byte), 8 * i));
      }
      if (halves) h = _mm512_inserti64x4(h, _mm512_castsi512_si256(l), 1);
      _mm512_storeu_si512(high + s * kLanes, h);
      if (!halves) _mm512_storeu_si512(low + s * kLanes, l);
      if (s % (kTile / 4) == kTile / 4 - 1) {
        const __m512i all = _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
        const __m512i sum = _mm512_slli_epi32(_mm512_sub_epi32(all, before), 4);
        _mm512_storeu_si512(Sums(group, k + 4 * s), sum);
        before = all;
      }
    }
    _mm512_storeu_si512(Parts(group, k), _mm512_slli_epi32(upper, 7));
    _mm512_storeu_si512(Parts(group, k) + kLanes, _mm512_slli_epi32(lower, 7));
  }
};

// The first `columns` of x [in, stride] -> ManyColumns, in memory of this thread. A tile more of words
// than there are may be read.
inline ManyColumns PackMany(ThreadPool& pool, const float* x, int64_t in, int64_t columns,
                            int64_t stride, bool halves) {
  ManyColumns made{nullptr, nullptr, nullptr, nullptr, in, columns, stride, halves};
  const int64_t groups = made.Groups(), tiles = made.Tiles(), blocks = made.Blocks();
  made.words = reinterpret_cast<int32_t*>(Scratch(2, (groups * tiles + 1) * kTile * (2 * kLanes / 4)));
  made.sums = reinterpret_cast<int32_t*>(Scratch(3, groups * (tiles + 3 * blocks) * kLanes));
  made.parts = made.sums + groups * tiles * kLanes;
  made.scales = reinterpret_cast<float*>(made.parts + groups * 2 * blocks * kLanes);
  Parallel(pool, groups * blocks,
           [=](int64_t i) { made.Pack(x, i / blocks, i % blocks * kDeep); });
  return made;
}

#endif  // SPECJAX_BYTE_DOTS

}  // namespace

#endif  // SPECJAX_BYTE_COLUMNS_H_
