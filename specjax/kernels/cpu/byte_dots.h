// Products of rows of eight-bit weights, with one scale each, by the processor's own dot products of
// bytes (AVX-512 VNNI).
//
// A column is rounded to 16 bits, with one scale for every kDeep inputs, and held as two bytes an
// input: 256 high + low. Each lane sums its bytes exactly, and the lanes are added as floats in one
// order, so that a column has the same bits beside any others. Rounding changes every input by at
// most 2^-16 of the largest one of its block, which is at most 5e-4 of the block's length.

#ifndef SPECJAX_BYTE_DOTS_H_
#define SPECJAX_BYTE_DOTS_H_

#include "tasks.h"
#include "vectors.h"

#if defined(__AVX512BW__) && !defined(SPECJAX_WITHOUT_DOTS) && \
    (defined(__AVX512VNNI__) || !defined(__clang__))  // Clang's assembler knows only what it compiles for
#define SPECJAX_BYTE_DOTS
#include <cpuid.h>
#endif

namespace {

#if defined(SPECJAX_BYTE_DOTS)

inline bool HasByteDots() {
  static const bool has = [] {
    uint32_t a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
  }();
  return has;
}

constexpr int64_t kBytes = 64;         // inputs of a vector
constexpr float kMostSixteen = 32639;  // 256 * 127 + 127

// Columns in 16 bits. Each has, for every kDeep inputs or fewer, a block of `high` and a block of
// `low` bytes, filled up with zeros.
struct ByteColumns {
  const int8_t* bytes;
  const IntVec* sums;   // [blocks, columns]: of each block the sums of the inputs, by lanes
  const float* scales;  // [blocks, columns]
  int64_t in, columns;

  static int64_t Blocks(int64_t in) { return (in + kDeep - 1) / kDeep; }
  static int64_t Length(int64_t inputs) { return (inputs + kBytes - 1) / kBytes * kBytes; }
  // The high bytes of a column's inputs from k on; the low ones follow.
  const int8_t* At(int64_t k, int64_t column) const {
    const int64_t length = Length(std::min(in - k, kDeep));
    return bytes + 2 * (k * columns + column * length);
  }
  int64_t Index(int64_t k, int64_t column) const { return k / kDeep * columns + column; }
};

// x [in, columns] -> ByteColumns. A column that is not finite has a scale of NaN.
inline ByteColumns PackBytes(const float* x, int64_t in, int64_t columns) {
  const float* rows = columns == 1 ? x : PackRows(x, in, columns, false);
  const int64_t blocks = ByteColumns::Blocks(in), count = blocks * columns;
  int8_t* bytes = reinterpret_cast<int8_t*>(Scratch(2, columns * ByteColumns::Length(in) / 2));
  float* numbers = Scratch(3, count * (kLanes + 1));
  IntVec* sums = reinterpret_cast<IntVec*>(numbers);
  float* scales = numbers + count * kLanes;
  const ByteColumns made{bytes, sums, scales, in, columns};
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  for (int64_t k = 0; k < in; k += kDeep) {
    const int64_t deep = std::min(in - k, kDeep), length = ByteColumns::Length(deep);
    for (int64_t m = 0; m < columns; ++m) {
      const float* from = rows + m * in + k;
      const auto load = [&](int64_t i) {
        const int64_t left = deep - i;
        const __mmask16 held = left >= kLanes ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
        return _mm512_maskz_loadu_ps(held, from + i);
      };
      __m512i most = _mm512_setzero_si512();  // as bits: what is not finite is above all else
      for (int64_t i = 0; i < deep; i += kLanes)
        most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(load(i)), no_sign));
      const uint32_t bits = _mm512_reduce_max_epu32(most);
      float largest;
      std::memcpy(&largest, &bits, sizeof largest);
      const bool finite = bits < 0x7f800000, some = finite && largest > 1e-30f;
      const int64_t at = made.Index(k, m);
      scales[at] = finite ? largest / kMostSixteen : std::nanf("");
      const Vec inverse = Vec{} + (some ? kMostSixteen / largest : 0);
      int8_t* high = bytes + 2 * (k * columns + m * length);
      IntVec sum = {};
      for (int64_t i = 0; i < length; i += kLanes) {
        const __m512i number = some ? _mm512_cvtps_epi32(load(i) * inverse) : _mm512_setzero_si512();
        const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24);
        const __m512i rest = _mm512_srai_epi32(_mm512_sub_epi32(number, low), 8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + i), _mm512_cvtepi32_epi8(rest));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + length + i), _mm512_cvtepi32_epi8(low));
      }
      // lane i of a dot product sums the inputs 4 i ... 4 i + 3 of every vector
      const __m512i ones = _mm512_set1_epi8(1);
      __m512i upper = _mm512_setzero_si512(), lower = upper;
      for (int64_t i = 0; i < length; i += kBytes) {
        const __m512i h = _mm512_loadu_si512(high + i), l = _mm512_loadu_si512(high + length + i);
        asm("vpdpbusd %2, %1, %0" : "+v"(upper) : "v"(ones), "v"(h));
        asm("vpdpbusd %2, %1, %0" : "+v"(lower) : "v"(ones), "v"(l));
      }
      sum = reinterpret_cast<IntVec>(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower));
      sums[at] = sum;
    }
  }
  return made;
}

// y[r, m] = scale[r] sum_k w[r, k] x[m, k] over the inputs k ... end - 1, of which a block of x
// consists, for R rows, `bytes` apart, and M columns. Rows `ahead` are fetched.
template <int R, int M>
ALWAYS_INLINE void FewBytes(const int8_t* w, const float* scale, int64_t bytes, const ByteColumns& x,
                            int64_t column, float* y, int64_t k, int64_t end, int64_t ahead, To to) {
  const int64_t deep = end - k, length = ByteColumns::Length(deep);
  const int8_t* from = x.At(k, column);
  const __m512i turn = _mm512_set1_epi8(-128);  // the dot product takes weights from 0 to 255
  IntVec sum[R * M];
  UNROLL
  for (int i = 0; i < R * M; ++i) sum[i] = IntVec{};
  Fetch next(w + ahead * bytes + k, deep, bytes);
  for (int64_t i = 0; i < 2 * length; i += kBytes) {  // the high bytes, then the low ones
    const bool low = i >= length;
    const int64_t j = low ? i - length : i;
    if (i == length) {
      UNROLL
      for (int n = 0; n < R * M; ++n) sum[n] <<= 8;
    }
    const __mmask64 held = deep - j >= kBytes ? ~0ull : (1ull << (deep - j)) - 1;
    __m512i a[R];
    UNROLL
    for (int r = 0; r < R; ++r) {
      a[r] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(held, w + r * bytes + k + j), turn);
      if (!low) next.Next();
    }
    UNROLL
    for (int m = 0; m < M; ++m) {
      const __m512i b = _mm512_loadu_si512(from + 2 * m * length + i);
      UNROLL
      for (int r = 0; r < R; ++r) asm("vpdpbusd %2, %1, %0" : "+v"(sum[r * M + m]) : "v"(a[r]), "v"(b));
    }
  }
  const int64_t at = x.Index(k, column);
  alignas(64) float total[(R * M + kLanes - 1) / kLanes * kLanes];
  Vec numbers[R * M];
  UNROLL
  for (int i = 0; i < R * M; ++i)
    numbers[i] = __builtin_convertvector(sum[i] - (x.sums[at + i % M] << 7), Vec);
  StoreAll<R * M>(total, [&](int i) { return numbers[i]; });
  for (int r = 0; r < R; ++r) {
    for (int m = 0; m < M; ++m) {
      float product = total[r * M + m] * (scale[r] * x.scales[at + m]);
      asm("" : "+x"(product));  // rounded before it is added, whatever the compiler contracts
      to(y, r, m, product);
    }
  }
}

template <int M, int R>
void ByteRows(const int8_t* w, const float* scale, int64_t bytes, const ByteColumns& x,
              int64_t column, float* y, int64_t k, int64_t end, int64_t rows, To to) {
  const int64_t ahead = Fetch::Ahead(R, end - k);
  int64_t r = 0;
  for (; r + R <= rows; r += R)
    FewBytes<R, M>(w + r * bytes, scale + r, bytes, x, column, y + r * to.down, k, end, ahead, to);
  for (; r < rows; ++r)
    FewBytes<1, M>(w + r * bytes, scale + r, bytes, x, column, y + r * to.down, k, end, ahead, to);
}

using BytesBy = void (*)(const int8_t*, const float*, int64_t, const ByteColumns&, int64_t, float*,
                         int64_t, int64_t, int64_t, To);
template <int... M>
constexpr std::array<BytesBy, sizeof...(M)> ByteTable(std::integer_sequence<int, M...>) {
  return {{&ByteRows<M + 1, RowsOf(M + 1, 1)>...}};
}
constexpr auto kByteRows = ByteTable(Counts{});

#endif  // SPECJAX_BYTE_DOTS

}  // namespace

#endif  // SPECJAX_BYTE_DOTS_H_
