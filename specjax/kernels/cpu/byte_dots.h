// Products of rows of eight-bit weights, with one scale each, with a few columns by the processor's
// own dot products of bytes (AVX-512 VNNI).
//
// The products of a block of inputs, of which a column has one scale, are summed exactly and the sum
// is rounded once, so that a column has the same bits beside any others and in any order of inputs.

#ifndef SPECJAX_BYTE_DOTS_H_
#define SPECJAX_BYTE_DOTS_H_

#include "byte_columns.h"
#include "tasks.h"
#include "vectors.h"

namespace {

#if defined(SPECJAX_BYTE_DOTS)

// to[i] = the exact sum over the lanes of v(i), rounded once, for i < N: half of the lanes of a block
// sum up to less than 2^31.
template <int N, int G = 0, typename V>
ALWAYS_INLINE void StoreExact(float* to, const V& v) {
  if constexpr (G < N) {
    constexpr int kCount = N - G < kLanes ? N - G : kLanes;
    const auto part = [&](int i) { return v(G + i); };
    alignas(64) IntVec a, b;  // templates take vectors to be aligned by their size
    Halves<1>(Sums<kCount, 2, 0>(part), Sums<kCount, 2, 1>(part), &a, &b);
    const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
    const auto add = [](__m256i x, __m256i y) {
      return _mm512_cvtpd_ps(_mm512_add_pd(_mm512_cvtepi32_pd(x), _mm512_cvtepi32_pd(y)));
    };
    _mm256_storeu_ps(to + G, add(_mm512_castsi512_si256(x), _mm512_castsi512_si256(y)));
    if (kCount > kLanes / 2)
      _mm256_storeu_ps(to + G + kLanes / 2,
                       add(_mm512_extracti64x4_epi64(x, 1), _mm512_extracti64x4_epi64(y, 1)));
    StoreExact<N, G + kLanes>(to, v);
  }
}

// y[r, m] = scale[r] sum_k w[r, k] x[m, k] over the inputs k ... end - 1, of which a block of x
// consists, for R rows, `bytes` apart, and M columns. Rows `ahead` are fetched.
template <int R, int M>
ALWAYS_INLINE void FewBytes(const int8_t* w, const float* scale, int64_t bytes, const FewColumns& x,
                            int64_t column, float* y, int64_t k, int64_t end, int64_t ahead, To to) {
  const int64_t deep = end - k, length = x.Length(deep);
  const int8_t* from = x.At(k, column);
  const __m512i turn = _mm512_set1_epi8(-128);  // the dot product takes weights from 0 to 255
  alignas(64) IntVec sum[R * M];  // as AddDots takes it
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
      if (!low) next.Next<2>();
    }
    UNROLL
    for (int m = 0; m < M; ++m) {
      const __m512i b = _mm512_loadu_si512(from + 2 * m * length + i);
      UNROLL
      for (int r = 0; r < R; ++r) AddDots(sum[r * M + m], a[r], b);
    }
  }
  const int64_t at = x.Index(k, column);
  alignas(64) float total[(R * M + kLanes - 1) / kLanes * kLanes];
  UNROLL
  for (int i = 0; i < R * M; ++i) sum[i] -= x.sums[at + i % M];
  StoreExact<R * M>(total, [&](int i) { return sum[i]; });
  for (int r = 0; r < R; ++r) {
    for (int m = 0; m < M; ++m) {
      float product = total[r * M + m] * (scale[r] * x.scales[at + m]);
      asm("" : "+x"(product));  // rounded before it is added, whatever the compiler contracts
      to(y, r, m, product);
    }
  }
}

template <int M, int R>
void ByteRows(const int8_t* w, const float* scale, int64_t bytes, const FewColumns& x,
              int64_t column, float* y, int64_t k, int64_t end, int64_t rows, To to) {
  const int64_t ahead = Fetch::Ahead(R, end - k);
  int64_t r = 0;
  for (; r + R <= rows; r += R)
    FewBytes<R, M>(w + r * bytes, scale + r, bytes, x, column, y + r * to.down, k, end, ahead, to);
  for (; r < rows; ++r)
    FewBytes<1, M>(w + r * bytes, scale + r, bytes, x, column, y + r * to.down, k, end, ahead, to);
}

using BytesBy = void (*)(const int8_t*, const float*, int64_t, const FewColumns&, int64_t, float*,
                         int64_t, int64_t, int64_t, To);
template <int... M>
constexpr std::array<BytesBy, sizeof...(M)> ByteTable(std::integer_sequence<int, M...>) {
  return {{&ByteRows<M + 1, DotRowsOf(M + 1)>...}};
}
constexpr auto kByteRows = ByteTable(Counts{});

#endif  // SPECJAX_BYTE_DOTS

}  // namespace

#endif  // SPECJAX_BYTE_DOTS_H_
