// Products of bfloat16 weights with bfloat16 columns by the processor's own dot products.
//
// Three ways, of which the best that the processor has is taken for all products: tiles (AMX), dot
// products of pairs (AVX-512 BF16), and widening to floats. Each sums a column in an order that does
// not depend on the other columns; the ways differ from each other in the last bits of a sum.

#ifndef SPECJAX_DOTS_H_
#define SPECJAX_DOTS_H_

#include "amx.h"
#include "bfloat16.h"
#include "few_columns.h"
#include "few_dots.h"
#include "tasks.h"
#include "vectors.h"

namespace {

enum Way { kWiden, kDots, kTiles };

// The best way that this processor, and its operating system, have.
inline Way BestWay() {
#if defined(SPECJAX_TILES)
  if (HasTilesOf(kHalfTiles)) return kTiles;
#endif
#if defined(SPECJAX_DOTS)
  uint32_t a, b, c, d;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1) return kDots;
#endif
  return kWiden;
}

inline Way ChosenWay() {
  static const Way way = BestWay();
  return way;
}

#if defined(__AVX512BW__)
// Two vectors of sums -> bfloat16.
ALWAYS_INLINE void PutBoth(const float* sums, Half* y) {
  const IntVec first = Nearest(Load(sums)), second = Nearest(Load(sums + kLanes));
  const auto narrow = [](IntVec v) { return _mm512_maskz_cvtepi32_epi16(-1, reinterpret_cast<__m512i>(v)); };
  _mm512_storeu_si512(y, _mm512_inserti64x4(_mm512_castsi256_si512(narrow(first)), narrow(second), 1));
}
#endif

// Sums [rows, pitch] -> bfloat16.
inline void PutRows(const float* sums, int64_t pitch, int64_t rows, int64_t columns, Half* y, To to) {
#if defined(__AVX512BW__)
  if (to.across == 1 && columns == 2 * kLanes) {
    for (int64_t r = 0; r < rows; ++r) PutBoth(sums + r * pitch, y + r * to.down);
    return;
  }
  for (int64_t m = 0; m < columns; m += kLanes) {
    const int64_t n = std::min<int64_t>(kLanes, columns - m);
    for (int64_t r = 0; r < rows; ++r) {
      alignas(64) Half row[kLanes];
      Put(Load(sums + r * pitch + m), row);
      Half* at = y + r * to.down + m * to.across;
      if (to.across == 1) {
        _mm256_mask_storeu_epi16(at, (1u << n) - 1, _mm256_load_si256(reinterpret_cast<__m256i*>(row)));
      } else {
        for (int64_t i = 0; i < n; ++i) at[i * to.across] = row[i];
      }
    }
  }
#else
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t m = 0; m < columns; ++m) Put(sums[r * pitch + m], y + r * to.down + m * to.across);
#endif
}

#if defined(SPECJAX_TILES)

// A tile holds 16 rows of 64 bytes: weights of 16 outputs and kDepth inputs, or of kDepth / 2 pairs
// of inputs and 16 columns, or their 16 x 16 sums.
constexpr int64_t kTile = 16, kDepth = 32;

// x [in, columns] -> for every 16 columns [pairs of inputs, columns, 2]: pairs first ... last - 1 of
// `pairs`; zeros fill up the inputs.
inline void PackPairs(const Half* x, int64_t in, int64_t columns, int64_t pairs, int64_t first, int64_t last,
                      uint32_t* packed) {
  alignas(64) uint16_t place[2 * kPairs];  // numbers of the odd row are counted from kPairs on
  for (int i = 0; i < 2 * kPairs; ++i) place[i] = i / 2 + i % 2 * kPairs;
  const __m512i low = _mm512_load_si512(place), high = _mm512_load_si512(place + kPairs);
  for (int64_t p = first; p < last; ++p) {
    for (int64_t m = 0; m < columns; m += kPairs) {
      const int64_t count = std::min<int64_t>(kPairs, columns - m);
      const int64_t n = std::min(kTile, count), more = count - n;
      const __mmask32 used = count == kPairs ? ~0u : (1u << count) - 1;
      const Half* row = x + 2 * p * columns + m;
      const __m512i even = _mm512_maskz_loadu_epi16(2 * p < in ? used : 0, row);
      const __m512i odd = _mm512_maskz_loadu_epi16(2 * p + 1 < in ? used : 0, row + columns);
      uint32_t* to = packed + m * pairs + p * n;
      _mm512_mask_storeu_epi32(to, (1u << n) - 1, _mm512_permutex2var_epi16(even, low, odd));
      if (more == 0) continue;
      to = packed + (m + n) * pairs + p * more;
      _mm512_mask_storeu_epi32(to, (1u << more) - 1, _mm512_permutex2var_epi16(even, high, odd));
    }
  }
}

// The same for all pairs.
inline const Half* PackTiles(ThreadPool& pool, const Half* x, int64_t in, int64_t columns) {
  constexpr int64_t kShare = 1 << 15;  // numbers of a task: below it another thread comes too late
  const int64_t pairs = (in + kDepth - 1) / kDepth * kDepth / 2, tasks = (in * columns + kShare - 1) / kShare;
  uint32_t* packed = reinterpret_cast<uint32_t*>(Scratch(0, pairs * columns));
  Parallel(pool, tasks, [=](int64_t i) {
    PackPairs(x, in, columns, pairs, pairs * i / tasks, pairs * (i + 1) / tasks, packed);
  });
  return reinterpret_cast<const Half*>(packed);
}

constexpr int64_t kPitch = 2 * kTile;  // floats of a row of sums: of two tiles

// Rows of sums that wait to be rounded, which is done while the next ones are summed.
struct Waiting {
  const float* sums;
  Half* y;
  To to;
  int64_t columns, rows, upper, lower;  // the sums of each tile's rows stand so many rows further down
  int64_t row = 0;                      // the next one

  ALWAYS_INLINE void Next() {
    const float* from = sums + (row + (row < kTile ? upper : lower)) * kPitch;
    Half* at = y + row++ * to.down;
    if (columns == kPitch && to.across == 1) {
      PutBoth(from, at);
    } else {
      PutRows(from, kPitch, 1, columns, at, to);
    }
  }
  void Finish() {
    while (row < rows) Next();
  }
};

// The products of two tiles of rows with one or two tiles of columns over inputs k ... end - 1, added to
// those of the inputs before: tiles 0 and 1 are sums of the first columns, 2 and 3 of the second, 4 and
// 5 weights, 6 and 7 columns. After each load of weights `bytes` of those that come `next` are fetched:
// before it, the load would wait for them. With kMany more tiles of columns meet the same rows.
template <bool kTwo, bool kMany>
WITH_TILES void TileRows(const Half* upper, const Half* lower, int64_t in, int64_t k, int64_t end,
                         const Half* x, const Half* second, int64_t n, int64_t more, const char* next,
                         int64_t bytes, Waiting before, float* sums) {
  constexpr int64_t kBytes = 4 * kPitch;
  alignas(64) Half rest[2 * kTile * kDepth];
  const auto fetch = [&]() __attribute__((always_inline)) {
    if constexpr (kMany) {
      for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(next + i, 0, 2);
    } else {
      UNROLL
      for (int64_t i = 0; i < kTile * kLine; i += kLine) __builtin_prefetch(next + i, 0, 2);
    }
    next += bytes;
  };
  int64_t stride = 2 * in;
  if (k == 0) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (kTwo) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
  } else {
    TILE_LOAD(0, sums, kBytes);
    TILE_LOAD(1, sums + kTile * kPitch, kBytes);
    if constexpr (kTwo) {
      TILE_LOAD(2, sums + kTile, kBytes);
      TILE_LOAD(3, sums + kTile * kPitch + kTile, kBytes);
    }
  }
  for (; k < end; k += kDepth) {
    const Half *a = upper + k, *b = lower + k;
    if (end - k < kDepth) {  // what comes after the row's end may be anything, or no memory at all
      std::fill_n(rest, 2 * kTile * kDepth, Half{0});
      for (int64_t r = 0; r < kTile; ++r) {
        std::copy_n(a + r * in, end - k, rest + r * kDepth);
        std::copy_n(b + r * in, end - k, rest + (kTile + r) * kDepth);
      }
      a = rest, b = rest + kTile * kDepth, stride = 2 * kDepth;
    }
    if constexpr (kMany) {
      TILE_STREAM(6, x + k * n, 4 * n);
    } else {
      TILE_LOAD(6, x + k * n, 4 * n);
    }
    TILE_LOAD(4, a, stride);
    fetch();
    TILE_HALVES(0, 4, 6);
    TILE_LOAD(5, b, stride);
    fetch();
    TILE_HALVES(1, 5, 6);
    if constexpr (kTwo) {
      if constexpr (kMany) {
        TILE_STREAM(7, second + k * more, 4 * more);
      } else {
        TILE_LOAD(7, second + k * more, 4 * more);
      }
      TILE_HALVES(2, 4, 7);
      TILE_HALVES(3, 5, 7);
    }
    if (before.row < before.rows) before.Next();
    if (before.row < before.rows) before.Next();
  }
  before.Finish();
  TILE_STORE(0, sums, kBytes);
  TILE_STORE(1, sums + kTile * kPitch, kBytes);
  if constexpr (kTwo) {
    TILE_STORE(2, sums + kTile, kBytes);
    TILE_STORE(3, sums + kTile * kPitch + kTile, kBytes);
  }
}

// A task's rows, `begin` ... `begin` + `height` - 1 of `out`, by all columns. So many inputs of 32 rows
// at a time stay in the L1 cache while all columns meet them; meanwhile the next rows are fetched.
WITH_TILES inline void TileTask(const Half* w, int64_t out, int64_t in, const Half* packed,
                                int64_t begin, int64_t height, int64_t columns, Half* y, To to) {
  constexpr int64_t kHeld = 640, kSums = 2 * kTile * kPitch;
  const int64_t length = (in + kDepth - 1) / kDepth * kDepth;
  if (out < kTile) {  // rows that are not there have weights of zero
    Half* room = reinterpret_cast<Half*>(Scratch(1, kTile * in));
    std::fill(std::copy_n(w, out * in, room), room + kTile * in, Half{0});
    w = room;
  }
  const int64_t groups = (columns + kPitch - 1) / kPitch;
  // rows that are multiples of 2 KiB share so few lines of the cache that they do not stay there
  const bool whole = groups == 1 || in % 1024 == 0;
  const int64_t blocks = whole ? 1 : (in + kHeld - 1) / kHeld;
  const int64_t deep = (length / kDepth + blocks - 1) / blocks * kDepth;
  const int64_t bytes = (kTile + groups - 1) / groups * kLine, of_call = deep / kTile * bytes;
  float* sums = Scratch(2, std::max<int64_t>(groups, 2) * kSums);
  int64_t configured = 0, turn = 0;
  Waiting waiting{};
  for (int64_t r = begin; r < begin + height; r += 2 * kTile) {
    // the last tiles overlap those before them: what they share is written once
    const int64_t last = std::max<int64_t>(out - kTile, 0);
    const int64_t upper = std::min(r, last), lower = std::min(r + kTile, last);
    const int64_t rows = std::min(2 * kTile, begin + height - r);
    const char* next = reinterpret_cast<const char*>(w + (upper + 2 * kTile) * in);
    for (int64_t k = 0; k < length; k += deep) {
      for (int64_t m = 0; m < columns; m += kPitch, next += of_call) {
        const int64_t n = std::min(kTile, columns - m);
        const int64_t more = std::min(kTile, columns - m - n);
        if (n + more != configured) {
          TileConfig config;
          for (int t = 0; t < 8; ++t) config.rows[t] = kTile;
          for (int t : {0, 1, 6}) config.bytes[t] = 4 * n;
          for (int t : {2, 3, 7}) config.bytes[t] = 4 * std::max<int64_t>(more, 1);
          for (int t : {4, 5}) config.bytes[t] = 2 * kDepth;
          TILES_AS(config);
          configured = n + more;
        }
        const Half *x = packed + m * length, *second = x + n * length;
        float* here = sums + (groups == 1 ? turn ^= 1 : m / kPitch) * kSums;
        const auto run = groups > 1 ? more > 0 ? &TileRows<true, true> : &TileRows<false, true>
                                    : more > 0 ? &TileRows<true, false> : &TileRows<false, false>;
        run(w + upper * in, w + lower * in, in, k, std::min(in, k + deep), x, second, n, more, next,
            bytes, waiting, here);
        waiting = {};
        if (k + deep < length) continue;
        Half* at = y + (r - begin) * to.down + m * to.across;
        waiting = {here, at, to, n + more, rows, r - upper, r + kTile - lower};
      }
    }
  }
  waiting.Finish();
  TILES_FREE();
}

#endif  // SPECJAX_TILES

// x [in, columns], weights [out, in] -> results [out, columns] each, or, with `transpose_out`,
// [columns, out]; all in bfloat16, summed in float32.
Problem HalfProducts(ThreadPool pool, In<kBF16> x, Ins weights, bool transpose_out, Outs results) {
  SameParts<Half> read;
  if (const Problem problem = read.Read(kBF16, weights, results)) return problem;
  auto& parts = read.parts;
  const int64_t count = weights.size;
  const int64_t in = x.dims[0], columns = x.dims[1], total = read.total;
  const Way way = ChosenWay();
  const Half* from = x.data<Half>();
  const void* packed = nullptr;
#if defined(SPECJAX_TILES)
  if (way == kTiles) packed = PackTiles(pool, from, in, columns);
#endif
#if defined(SPECJAX_DOTS)
  if (way == kDots) packed = PackHalves(from, in, columns);
#endif
  if (way == kWiden) packed = PackRows(from, in, columns, true);
  const int64_t rows = TaskRows(pool, total * in * 2, total, way == kTiles ? 32 : kBlock);
  const int64_t tasks = DivideParts(parts.data(), count, rows);
  Parallel(pool, tasks, [=](int64_t task) {
    const auto [part, begin, height] = ShareOf(parts.data(), task, rows);
    const To to{transpose_out ? 1 : columns, transpose_out ? part->out : 1, false};
    Half* y = part->result + begin * to.down;
#if defined(SPECJAX_TILES)
    if (way == kTiles) {
      TileTask(part->weight, part->out, in, static_cast<const Half*>(packed), begin, height,
               columns, y, to);
      return;
    }
#endif
    float* sums = Scratch(1, height * columns + kLanes);
#if defined(SPECJAX_DOTS)
    if (way == kDots) {
      const Half* x = static_cast<const Half*>(packed);
      const Soon<Half> after = After<Half>(part->weight, part->out, in, begin, height, 0, in, in);
      const int64_t pitch = Pitch(in, sizeof(Half)), bytes = 2 * in;
      EachShare(height, columns, [&](int64_t r, int64_t rows, int64_t m, int64_t few, ColumnShare share) {
        const Half *row = part->weight + (begin + r) * in, *column = x + m * pitch;
        float* at = sums + r * columns + m;
        if (share.count > 1 && kBlock * bytes <= kMostOfBlock) {
          const Half* coming = share.Coming(row, in, in, after).row;
          const FetchPart next(coming, bytes, bytes, rows, share.index, share.count);
          kDotParts[few - kLeastShare](row, column, at, in, rows, next, columns);
        } else {
          const Fetch next(row + Fetch::Ahead(DotRowsOf(few), bytes) * in, bytes, bytes);
          kDotRows[few - 1](row, column, at, in, rows, next, columns);
        }
      });
      PutRows(sums, columns, height, columns, y, to);
      return;
    }
#endif
    const To across{columns, 1, false};
    TaskBy(static_cast<const Pair*>(part->weight), static_cast<const float*>(packed), sums, part->out,
           in, begin, height, columns, across);
    PutRows(sums, columns, height, columns, y, to);
  });
  return nullptr;
}

}  // namespace

#endif  // SPECJAX_DOTS_H_
