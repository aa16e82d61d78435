// Products of weights in eight or four bits with columns of floats, for CPUs.
//
// A weight is read once for up to eight columns and becomes floats in registers, times the scale of
// its group; its products are those of these floats. Every column is summed in the same order,
// however many there are and whichever thread computes the row. Where the processor multiplies
// bytes, so are weights of eight bits with one scale a row (byte_dots.h) and weights of four bits
// (nibble_dots.h), and both with any number of columns (byte_tiles.h, amx_products.h).

#include "amx_products.h"
#include "byte_dots.h"
#include "byte_tiles.h"
#include "nibble_dots.h"
#include "tasks.h"
#include "vectors.h"

namespace {

typedef int8_t ByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef uint8_t CodeVec __attribute__((vector_size(kLanes), aligned(1), may_alias));

// The floats that kLanes signed bytes stand for.
ALWAYS_INLINE Vec Widen(const uint8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  const ByteVec bytes = *reinterpret_cast<const ByteVec*>(p);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}

// kLanes bytes, each in the lowest bits of a lane.
ALWAYS_INLINE IntVec Spread(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<IntVec>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<IntVec>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const CodeVec*>(p), IntVec);
#endif
}

#if defined(__aarch64__)
// Bytes that are read at once. Compilers would widen them one after the other.
constexpr int kRead = 16;
// Registers that a row and a column take beside the sums, by Kind: those of bytes too.
constexpr int kEach[] = {3, 3, 4};

// The floats that the bytes 4 i ... 4 i + 3 stand for: each comes above zeros in a lane, as 2^24 times
// its number.
ALWAYS_INLINE Vec Four(int8x16_t bytes, int i) {
  constexpr uint8_t kZero = 128;
  const uint8x16_t first = {kZero, kZero, kZero, 0, kZero, kZero, kZero, 1,
                            kZero, kZero, kZero, 2, kZero, kZero, kZero, 3};
  const int8x16_t spread = vqtbl1q_s8(bytes, vaddq_u8(first, vdupq_n_u8(4 * i)));
  return vcvtq_n_f32_s32(vreinterpretq_s32_s8(spread), 24);
}

// kRead signed bytes, and kRead bytes of two values each.
struct Signed {
  int8x16_t bytes;
  ALWAYS_INLINE explicit Signed(const uint8_t* p) : bytes(vld1q_s8(reinterpret_cast<const int8_t*>(p))) {}
  ALWAYS_INLINE Vec Floats(int i) const { return Four(bytes, i); }
};
struct Codes {
  uint8x16_t bytes;
  ALWAYS_INLINE explicit Codes(const uint8_t* p) : bytes(vld1q_u8(p)) {}
  ALWAYS_INLINE Vec Low(int i) const { return Four(vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))), i); }
  ALWAYS_INLINE Vec High(int i) const { return Four(vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4)), i); }
};
#else
constexpr int kRead = kLanes;
constexpr int kEach[] = {1, 1, 2};

struct Signed {
  Vec floats;
  ALWAYS_INLINE explicit Signed(const uint8_t* p) : floats(Widen(p)) {}
  ALWAYS_INLINE Vec Floats(int) const { return floats; }
};
struct Codes {
  IntVec bytes;
  ALWAYS_INLINE explicit Codes(const uint8_t* p) : bytes(Spread(p)) {}
  ALWAYS_INLINE IntVec Low(int) const { return bytes; }
  ALWAYS_INLINE IntVec High(int) const { return bytes >> 4; }
};
#endif

// The numbers for which the values of a group of inputs stand: scale (value - zero), rounded once
// where there is a table of them, or where the product of scale and zero is exact, as by 0 and by 8.
struct Group {
  Vec scale, shift;
#if defined(__AVX512F__)
  Vec table = {};

  // The number for which the lowest four bits of each lane stand.
  ALWAYS_INLINE Vec Code(IntVec v) const {
    return _mm512_maskz_permutexvar_ps(-1, reinterpret_cast<__m512i>(v), table);
  }
#elif defined(__aarch64__)
  ALWAYS_INLINE Vec Code(Vec v) const { return Fma(v, scale, shift); }
#else
  ALWAYS_INLINE Vec Code(IntVec v) const {
    return Fma(__builtin_convertvector(v & 15, Vec), scale, shift);
  }
#endif

  Group() = default;
  ALWAYS_INLINE Group(float by, float zero, bool codes) {
    scale = Vec{} + by;
    shift = Vec{} - by * zero;
#if defined(__AVX512F__)
    const Vec all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (codes) table = (all - zero) * scale;
#else
    (void)codes;
#endif
  }
};

// Rows of a weight in few bits: weight[r, k] = scale[r, k / group] (value[r, k] - zero[r, k / group]).
struct Weight {
  const uint8_t* values;  // int8 [out, in], or two values of four bits a byte [out, in / 2]
  const float* scales;    // [out, groups]
  const int8_t* zeros;    // [out, groups], or null: 0 of eight bits, 8 of four
  int64_t bytes, groups, group;

  Weight From(int64_t row) const {
    const int64_t at = row * groups;
    return {values + row * bytes, scales + at, zeros == nullptr ? zeros : zeros + at, bytes, groups, group};
  }
};

enum Kind { kChannel, kEight, kFour };  // eight bits and a scale a row; eight, or four, in groups

// The sums of a row of eight-bit values, with the inputs k ... end - 1, which fill no vector, and
// the row's scale. A function of its own: otherwise a compiler may round products with it here, but
// not there.
__attribute__((noinline)) void FinishRow(const int8_t* row, float scale, const float* x, int64_t pitch,
                                         int64_t k, int64_t end, int columns, float* total) {
  for (int m = 0; m < columns; ++m) {
    for (int64_t t = k; t < end; ++t) total[m] += static_cast<float>(row[t]) * x[m * pitch + t];
    total[m] *= scale;
  }
}

// kRead bytes of each of R rows, from byte `at` on.
template <typename Bytes, int R, size_t... r>
ALWAYS_INLINE std::array<Bytes, R> ReadRows(const Weight& w, int64_t at, std::index_sequence<r...>) {
  return {{Bytes(w.values + r * w.bytes + at)...}};
}
template <typename Bytes, int R>
ALWAYS_INLINE std::array<Bytes, R> ReadRows(const Weight& w, int64_t at) {
  return ReadRows<Bytes, R>(w, at, std::make_index_sequence<R>{});
}

// y[r, m] = sum_k weight[r, k] x[m, k] over the inputs k ... end - 1, for R rows and M columns of
// `in` inputs; in groups, k and end are multiples of kTile. Rows `ahead` are fetched.
template <int R, int M, Kind kKind>
ALWAYS_INLINE void Narrow(const Weight& w, const float* x, float* y, int64_t in, int64_t k,
                          int64_t end, int64_t ahead, To to) {
  Vec sum[R * M];
  UNROLL
  for (int i = 0; i < R * M; ++i) sum[i] = Vec{};
  constexpr int64_t shorter = kKind == kFour ? 2 : 1;
  const int64_t pitch = Pitch(in);
  Fetch next(w.values + ahead * w.bytes + k / shorter, (end - k) / shorter, w.bytes);
  const auto fetch = [&]() __attribute__((always_inline)) {
    UNROLL
    for (int r = 0; r < R; ++r) next.Next();
  };
  const auto add = [&](const Vec* a, int64_t at) __attribute__((always_inline)) {
    UNROLL
    for (int m = 0; m < M; ++m) {
      const Vec b = Once(Load(x + m * pitch + at));
      UNROLL
      for (int r = 0; r < R; ++r) sum[r * M + m] = Fma(a[r], b, sum[r * M + m]);
    }
  };
  if constexpr (kKind == kChannel) {
    constexpr int kStep = 64;  // a cache line of each row at a time
    for (; k + kStep <= end; k += kStep) {
      UNROLL
      for (int j = 0; j < kStep; j += kRead) {
        const auto read = ReadRows<Signed, R>(w, k + j);
        UNROLL
        for (int i = 0; i < kRead / kLanes; ++i) {
          Vec a[R];
          UNROLL
          for (int r = 0; r < R; ++r) a[r] = Once(read[r].Floats(i));
          add(a, k + j + i * kLanes);
        }
      }
      fetch();
    }
    for (; k + kLanes <= end; k += kLanes) {
      Vec a[R];
      UNROLL
      for (int r = 0; r < R; ++r) a[r] = Once(Widen(w.values + r * w.bytes + k));
      add(a, k);
    }
  } else {
    for (int64_t g = k / w.group; k < end; ++g) {
      const int64_t stop = std::min(end, (g + 1) * w.group);
      Group group[R];
      UNROLL
      for (int r = 0; r < R; ++r) {
        const int64_t at = r * w.groups + g;
        const float zero = w.zeros != nullptr ? w.zeros[at] : kKind == kFour ? 8 : 0;
        group[r] = Group(w.scales[at], zero, kKind == kFour);
      }
      for (; k < stop; k += kTile) {
        constexpr int kBytes = kTile / shorter;
        UNROLL
        for (int j = 0; j < kBytes; j += kRead) {
          const auto read = ReadRows<std::conditional_t<kKind == kFour, Codes, Signed>, R>(w, k / shorter + j);
          UNROLL
          for (int i = 0; i < kRead / kLanes; ++i) {
            const int64_t at = k + j + i * kLanes;
            Vec a[R], high[R];
            UNROLL
            for (int r = 0; r < R; ++r) {
              if constexpr (kKind == kEight) {
                a[r] = Once(Fma(read[r].Floats(i), group[r].scale, group[r].shift));
              } else {
                a[r] = Once(group[r].Code(read[r].Low(i)));
                high[r] = Once(group[r].Code(read[r].High(i)));
              }
            }
            add(a, at);
            if constexpr (kKind == kFour) add(high, at + kBytes);
          }
        }
        if (k % (kLine * shorter) == 0) fetch();
      }
    }
  }
  alignas(64) float total[(R * M + kLanes - 1) / kLanes * kLanes];
  StoreAll<R * M>(total, [&](int i) { return sum[i]; });
  for (int r = 0; r < R; ++r) {
    if constexpr (kKind == kChannel) {
      const auto* row = reinterpret_cast<const int8_t*>(w.values + r * w.bytes);
      FinishRow(row, w.scales[r], x, pitch, k, end, M, total + r * M);
    }
    for (int m = 0; m < M; ++m) to(y, r, m, total[r * M + m]);
  }
}

template <int M, int R, Kind kKind>
void NarrowRows(const Weight& w, const float* x, float* y, int64_t in, int64_t k, int64_t end,
                int64_t rows, To to) {
  const int64_t ahead = Fetch::Ahead(R, (end - k) / (kKind == kFour ? 2 : 1));
  int64_t r = 0;
  for (; r + R <= rows; r += R)
    Narrow<R, M, kKind>(w.From(r), x, y + r * to.down, in, k, end, ahead, to);
  for (; r < rows; ++r)
    Narrow<1, M, kKind>(w.From(r), x, y + r * to.down, in, k, end, ahead, to);
}

using Rows = void (*)(const Weight&, const float*, float*, int64_t, int64_t, int64_t, int64_t, To);
template <Kind kKind, int... M>
constexpr std::array<Rows, sizeof...(M)> Table(std::integer_sequence<int, M...>) {
  return {{&NarrowRows<M + 1, RowsOf(M + 1, kEach[kKind]), kKind>...}};
}
constexpr std::array<std::array<Rows, kFew>, 3> kRows = {
    {Table<kChannel>(Counts{}), Table<kEight>(Counts{}), Table<kFour>(Counts{})}};

#if defined(SPECJAX_BYTE_DOTS)
// Products of rows in eight and in four bits with many columns: by dot products, by tiles, and by
// tiles where weights of four bits become 16.
using ManyBy = void (*)(const TallRows&, const ManyColumns&, float*, To);
constexpr ManyBy kProducts[3][2] = {{&TallProducts<false>, &TallProducts<true>},
#if defined(SPECJAX_TILES)
                                    {&TileProducts<Form::kEight>, &TileProducts<Form::kFour>},
                                    {&TileProducts<Form::kEight>, &WordProducts}
#endif
};
#endif

// x [in, columns]; of each weight three arrays: values int8 [out, in] or uint8 [out, in / 2], scales
// float32 [out, groups], zeros int8 [out, groups] or none at all [0] -> results [out, columns] each,
// or, with `transpose_out`, [columns, out]. With `words`, weights of four bits may become 16 bits for
// many columns.
Problem Quantized(ThreadPool pool, In<kF32> x, Ins arrays, bool transpose_out,
                  [[maybe_unused]] bool words, Outs results) {
  struct Part {
    Weight weight;
    Kind kind;
    float* result;
    int64_t out, tasks;
  };
  constexpr int64_t kMost = 8;
  std::array<Part, kMost> parts;
  int64_t count = results.size;
  if (count > kMost || arrays.size != 3 * count)
    return "quantized: at most 8 weights of three arrays";
  const int64_t in = x.dims[0], columns = x.dims[1];
  int64_t total = 0, total_bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Buffer values = arrays[3 * i], scales = arrays[3 * i + 1], zeros = arrays[3 * i + 2];
    const Buffer result = results[i];
    if ((values.type != kU8 && values.type != kS8) || scales.type != kF32 || zeros.type != kS8 ||
        result.type != kF32)
      return "quantized: values of 4 or 8 bits, zeros of 8, the rest float32";
    const int64_t out = values.dims[0], bytes = values.dims[1], groups = scales.dims[1];
    const bool plain = zeros.count() == 0;
    const Kind kind = values.type == kU8 ? kFour : plain && groups == 1 ? kChannel : kEight;
    parts[i] = Part{{values.data<const uint8_t>(), scales.data<const float>(),
                     plain ? nullptr : zeros.data<const int8_t>(), bytes, groups, in / groups},
                    kind, result.data<float>(), out, 0};
    total += out;
    total_bytes += out * in * 2;  // as much work as weights of this size
  }
  const int64_t rows = TaskRows(pool, total_bytes, total);
#if defined(SPECJAX_BYTE_DOTS)
  const bool dots = HasByteDots();
  const auto eight = [=](const Part& part) { return dots && part.kind == kChannel; };
  const auto four = [=](const Part& part) { return dots && part.kind == kFour; };
  const auto as_bytes = [=](const Part& part) { return eight(part) || four(part); };
  const auto first = parts.begin(), end = first + count;
  const bool eights = std::any_of(first, end, eight), fours = std::any_of(first, end, four);
  const bool tiles = HasByteTiles() && columns >= kEightColumns && (!fours || columns >= kFourColumns);
  const bool many = tiles || columns >= kManyColumns;
  const int way = !tiles ? 0 : words && columns >= kWordColumns ? 2 : 1;  // of kProducts
  if (many && (eights || fours)) {
    std::array<Part, kMost> tall;
    const auto last = std::copy_if(first, end, tall.begin(), as_bytes);
    const int64_t rows = tiles ? TaskRows(pool, total * in, total, kAmxRows) : kTallRows;
    const int64_t tasks = DivideParts(tall.data(), last - tall.begin(), rows);
    const int64_t most = way == 2 ? 2 * kAmxColumns : tiles ? kAmxColumns : kMostColumns;
    for (int64_t column = 0; column < columns; column += most) {
      const int64_t some = std::min(most, columns - column);
      const bool halves = way == 1 && some <= kLanes / 2;
      const ManyColumns packed = PackMany(pool, x.data<const float>() + column, in, some, columns, halves);
      Parallel(pool, tasks, [=](int64_t task) {
        const auto [part, begin, height] = ShareOf(tall.data(), task, rows);
        const To to{transpose_out ? 1 : columns, transpose_out ? part->out : 1, false};
        const Weight w = part->weight.From(begin);
        const TallRows held{w.values, w.scales, w.zeros, w.bytes, w.groups, w.group, height};
        float* y = part->result + begin * to.down + column * to.across;
        kProducts[way][part->kind == kFour](held, packed, y, to);
      });
    }
    count = std::remove_if(first, end, as_bytes) - first;
    if (count == 0) return nullptr;
  }
  FewColumns bytes{}, nibbles{};
  if (!many && eights) bytes = PackFew(x.data<const float>(), in, columns, false);
  if (!many && fours) nibbles = PackFew(x.data<const float>(), in, columns, true);
  const bool floats = !std::all_of(first, first + count, as_bytes);
#else
  constexpr bool floats = true;
#endif
  const float* packed = floats ? PackRows(x.data<const float>(), in, columns, false) : nullptr;
  const int64_t tasks = DivideParts(parts.data(), count, rows);
  Parallel(pool, tasks, [=](int64_t task) {
    const auto [part, begin, height] = ShareOf(parts.data(), task, rows);
    To to{transpose_out ? 1 : columns, transpose_out ? part->out : 1, false};
    float* y = part->result + begin * to.down;
    for (int64_t k = 0; k < in; k += kDeep, to.add = true) {
      const int64_t stop = std::min(in, k + kDeep);
      EachShare(height, columns, [&](int64_t r, int64_t rows, int64_t m, int64_t few, ColumnShare) {
        const Weight w = part->weight.From(begin + r);
        float* at = y + r * to.down + m * to.across;
#if defined(SPECJAX_BYTE_DOTS)
        if (eight(*part)) {
          kByteRows[few - 1](reinterpret_cast<const int8_t*>(w.values), w.scales, w.bytes, bytes, m,
                             at, k, stop, rows, to);
          return;
        }
        if (four(*part)) {
          const NibbleRows some{w.values, w.scales, w.zeros, w.bytes, w.groups, w.group};
          kNibblesBy[few - 1](some, nibbles, m, at, k, stop, rows, to);
          return;
        }
#endif
        kRows[part->kind][few - 1](w, packed + m * Pitch(in), at, in, k, stop, rows, to);
      });
    }
  });
  return nullptr;
}

}  // namespace

KERNEL(SpecjaxQuantized, Quantized, "transpose_out", "words")

// Whether bytes are multiplied as such, and the number of columns is not limited.
extern "C" int SpecjaxHasByteDots() {
#if defined(SPECJAX_BYTE_DOTS)
  return HasByteDots();
#else
  return 0;
#endif
}
