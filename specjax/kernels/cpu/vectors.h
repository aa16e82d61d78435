// Vectors as wide as those of the processor that is compiled for, sums over their lanes, memory of
// a thread, and where a result goes.

#ifndef SPECJAX_VECTORS_H_
#define SPECJAX_VECTORS_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__x86_64__)
constexpr int kLanes = 4, kRegisters = 16;
#else
constexpr int kLanes = 4, kRegisters = 32;
#endif
constexpr int kFew = 8;           // columns at a time where sums run along the rows of the matrix
constexpr int64_t kBlock = 24;    // rows that stay in the caches, with the next ones, while all columns meet them
// Inputs at a time of weights in few bits, so that the columns stay in the L1 cache; and of weights
// that are floats: longer rows come faster from memory, and the columns may come from the L2 cache.
constexpr int64_t kDeep = 1024, kLong = 2048;
constexpr int64_t kLine = 64;     // bytes of a cache line
constexpr int64_t kAhead = 8192;  // bytes, at least, between what is fetched and what is used
constexpr int64_t kMostAhead = 64;  // rows, at most, between them, where rows are short

// How many numbers of `bytes` bytes lie between the beginnings of two packed columns of `in` inputs:
// an odd number of cache lines, since columns a multiple of 4 KiB apart would share few lines of the L1
// cache. Longer ones, of which pieces are held, lie half of 4 KiB and a line further apart than a
// multiple of it, so that pieces of up to 2 KiB of eight of them share the cache evenly.
inline int64_t Pitch(int64_t in, int64_t bytes = 4) {
  constexpr int64_t kSets = 4096 / kLine;
  const int64_t lines = (bytes * in + kLine - 1) / kLine | 1;
  const int64_t more = lines > kSets ? (kSets / 2 + 1 - lines % kSets + kSets) % kSets : 0;
  return (lines + more) * kLine / bytes;
}

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")  // of loops over what is to stay in registers

typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec Load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline float Number(float x) { return x; }
inline void Store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec All(float x) { return x - Vec{}; }  // a sum with zero would change -0

// Memory of the calling thread, aligned to a cache line: unaligned vectors cost two loads.
inline float* Scratch(int slot, int64_t floats) {
  thread_local std::array<std::vector<float>, 6> memory;
  auto& m = memory[slot];
  if (static_cast<int64_t>(m.size()) < floats + 16) m.resize(floats + 16);
  return m.data() + (64 - (reinterpret_cast<uintptr_t>(m.data()) & 63)) % 64 / 4;
}

// Lanes of two vectors, of which those of b are counted from kLanes on.
template <typename V>
ALWAYS_INLINE V Pick(V a, V b, IntVec lanes) {
#if defined(__clang__)
  V picked;
  for (int i = 0; i < kLanes; ++i) picked[i] = lanes[i] < kLanes ? a[lanes[i]] : b[lanes[i] - kLanes];
  return picked;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Two vectors whose sum is that of neighbours H lanes apart: of each of a and b, over half as many
// lanes.
template <int H, typename V>
ALWAYS_INLINE void Halves(V a, V b, V* first, V* second) {
  IntVec low, high;
  for (int i = 0; i < kLanes; ++i) {
    const int group = i / H;
    low[i] = group / 2 * 2 * H + i % H + (group % 2 ? kLanes : 0);
    high[i] = low[i] + H;
  }
  *first = Pick(a, b, low);
  *second = Pick(a, b, high);
}

// Adds vectors pairwise so that each of the results is spread over half as many lanes.
template <int H, typename V>
ALWAYS_INLINE V Fold(V a, V b) {
  V x, y;
  Halves<H>(a, b, &x, &y);
  return x + y;
}

// Lane i of the result is the sum of v(i), by a tree; v(i) is zero from N on. Depth first, so that
// few of the vectors are alive at once.
template <int N, int H = 1, int I = 0, typename V>
ALWAYS_INLINE auto Sums(const V& v) {
  if constexpr (I >= N) {
    return decltype(v(0)){};
  } else if constexpr (H == kLanes) {
    return v(I);
  } else {
    return Fold<H>(Sums<N, 2 * H, I>(v), Sums<N, 2 * H, I + H>(v));
  }
}

// `to[i]` = the sum of v(i), for i < N; room is a multiple of kLanes.
template <int N, int G = 0, typename V>
ALWAYS_INLINE void StoreAll(float* to, const V& v) {
  if constexpr (G < N) {
    Store(to + G, Sums<(N - G < kLanes ? N - G : kLanes)>([&](int i) { return v(G + i); }));
    StoreAll<N, G + kLanes>(to, v);
  }
}

// a b + c, rounded once: whether compilers contract a product and a sum differs with their number.
// (On ARM by the instruction itself: GCC 12 copies sums from register to register around vfmaq_f32.)
ALWAYS_INLINE Vec Fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(c) : "w"(a), "w"(b));
  return c;
#else
  return a * b + c;
#endif
}

ALWAYS_INLINE float Fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Loads that the compiler would repeat in every product that takes them.
ALWAYS_INLINE Vec Once(Vec v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#endif
  return v;
}

// A product that is rounded before anything is added to it, whatever the compiler contracts.
ALWAYS_INLINE Vec Apart(Vec v) {
#if defined(__aarch64__)
  asm("" : "+w"(v));
  return v;
#else
  return Once(v);
#endif
}

// Fetches a matrix ahead of its use, line by line in the order in which it lies in memory: where
// several rows are read side by side, the processor itself foresees little of that.
class Fetch {
 public:
  // How many rows are fetched ahead of `rows` that are used at a time, each of `bytes`: those of about
  // `distance` bytes, but at most kMostAhead.
  static int64_t Ahead(int64_t rows, int64_t bytes, int64_t distance = kAhead) {
    return std::max(rows, std::min<int64_t>(distance / bytes, kMostAhead));
  }

  // From `p` on, `bytes` of each row; rows are `stride` bytes apart.
  ALWAYS_INLINE Fetch(const void* p, int64_t bytes, int64_t stride)
      : at_(static_cast<const char*>(p)), lines_((bytes + kLine - 1) / kLine),
        gap_(stride - lines_ * kLine) {}
  // Into the L1 cache, or at kLevel 2 the L2 cache.
  template <int kLevel = 1>
  ALWAYS_INLINE void Next() {
    __builtin_prefetch(at_, 0, 4 - kLevel);
    at_ += kLine;
    if (++line_ == lines_) line_ = 0, at_ += gap_;
  }
  // Several lines, into the L2 cache.
  template <int kLines>
  ALWAYS_INLINE void Lines() {
    UNROLL
    for (int i = 0; i < kLines; ++i) Next<2>();
  }
  // Counts a step of the loop; returns whether lines are fetched in it.
  static constexpr bool Step() { return true; }

 protected:
  const char* at_;
  int64_t line_ = 0, lines_, gap_;
};

// Fetches part `index` of `count` equal parts of these rows, in one step of `count`; or nothing, where
// `p` is null.
class FetchPart : public Fetch {
 public:
  ALWAYS_INLINE FetchPart(const void* p, int64_t bytes, int64_t stride, int64_t rows, int64_t index,
                          int64_t count)
      : Fetch(p, bytes, stride), pace_(count), wait_(p == nullptr ? INT64_MAX : count) {
    if (p == nullptr) return;
    const int64_t first = rows * lines_ * index / count;
    line_ = first % lines_;
    at_ += first / lines_ * stride + line_ * kLine;
  }
  ALWAYS_INLINE bool Step() {
    if (--wait_ > 0) return false;
    wait_ = pace_;
    return true;
  }

 private:
  int64_t pace_, wait_;
};

// Where a result goes: its strides, and whether it is added to what stands there.
struct To {
  int64_t down, across;
  bool add;
  void operator()(float* y, int64_t row, int64_t column, float value) const {
    float& at = y[row * down + column * across];
    at = add ? at + value : value;
  }
};

// Rows at a time by this many columns: as many as the registers have room for, beside the vectors
// that are multiplied, `each` a row and a column; a divisor of kBlock. (Six by four are no faster.)
constexpr int RowsOf(int columns, int each) {
  const int most = (kRegisters - 2 * each) / (columns + each);
  return most > 6 ? 6 : most > 4 ? 4 : std::max(most, 1);
}
// The same where an `asm` adds to the sums beside a Fetch: there GCC 12 keeps 20 or more in memory.
constexpr int DotRowsOf(int columns) {
  int rows = RowsOf(columns, 1);
  while (rows * columns > 18 || kBlock % rows != 0) --rows;
  return rows;
}
using Counts = std::make_integer_sequence<int, kFew>;
// Columns of a share, where there are several: as equal as can be, they have at least half of kFew.
constexpr int kLeastShare = kFew / 2;
using ShareCounts = std::make_integer_sequence<int, kFew - kLeastShare + 1>;

// x [in, M] -> rows [M, pitch]: inputs k ... k + kStep kLanes - 1, of which those that are a multiple
// of kStep come first. An output is put together from one vector after the other.
template <int M, int kStep>
ALWAYS_INLINE void PackVectors(const float* x, int64_t pitch, int64_t k, float* rows) {
  Vec from[M * kStep];
  UNROLL
  for (int j = 0; j < M * kStep; ++j) from[j] = Load(x + k * M + j * kLanes);
  UNROLL
  for (int m = 0; m < M; ++m) {
    UNROLL
    for (int h = 0; h < kStep; ++h) {
      Vec to = from[0];
      UNROLL
      for (int j = 1; j < M * kStep; ++j) {
        IntVec pick;
        for (int i = 0; i < kLanes; ++i) {
          const int at = (i * kStep + h) * M + m;  // where lane i of the output lies
          pick[i] = at / kLanes == j ? kLanes + at % kLanes : j == 1 && at < kLanes ? at : i;
        }
        to = Pick(to, from[j], pick);
      }
      Store(rows + m * pitch + k + h * kLanes, to);
    }
  }
}

template <int M, int kStep>
void PackAll(const float* x, int64_t pitch, int64_t end, float* rows) {
  if constexpr (M * kStep == 1) {
    std::memcpy(rows, x, sizeof(float) * end);
  } else {
    for (int64_t k = 0; k < end; k += kStep * kLanes) PackVectors<M, kStep>(x, pitch, k, rows);
  }
}
template <int kStep, int... M>
constexpr auto PackTable(std::integer_sequence<int, M...>) {
  return std::array{&PackAll<M + 1, kStep>...};
}
template <int kStep>
constexpr auto kPackBy = PackTable<kStep>(Counts{});  // by the number of columns, less one

// x [in, columns] -> [in, some]: its columns from m on, at most kFew, in memory of the thread.
inline const float* SideBySide(const float* x, int64_t in, int64_t columns, int64_t m, int64_t some) {
  float* to = Scratch(1, in * some);
  const int64_t safe = in - kFew;  // what is copied too much is in x, and is written over
  for (int64_t k = 0; k < safe; ++k)
    std::memcpy(to + k * some, x + k * columns + m, sizeof(float) * kFew);
  for (int64_t k = std::max<int64_t>(safe, 0); k < in; ++k)
    for (int64_t i = 0; i < some; ++i) to[k * some + i] = x[k * columns + m + i];
  return to;
}

// x [in, columns] -> floats [columns, Pitch(in)]; with `pairs`, of every two vectors of inputs the
// even ones come first.
template <typename X>
float* PackRows(const X* x, int64_t in, int64_t columns, bool pairs) {
  const int64_t pitch = Pitch(in), group = pairs ? 2 * kLanes : kLanes, whole = in / group * group;
  float* rows = Scratch(0, columns * pitch);
  int64_t k = 0;
  if constexpr (std::is_same_v<X, float>) {
    for (int64_t m = 0; m < columns; m += kFew) {
      const int64_t some = std::min<int64_t>(kFew, columns - m);
      const float* from = some == columns ? x : SideBySide(x, in, columns, m, some);
      (pairs ? kPackBy<2> : kPackBy<1>)[some - 1](from, pitch, whole, rows + m * pitch);
    }
    k = whole;
  }
  for (; k < in; ++k) {
    const int64_t i = k % (2 * kLanes);
    const int64_t to = pairs && k < whole ? k - i + i / 2 + i % 2 * kLanes : k;
    for (int64_t m = 0; m < columns; ++m) rows[m * pitch + to] = Number(x[k * columns + m]);
  }
  return rows;
}

}  // namespace

#endif  // SPECJAX_VECTORS_H_
