// Products of the rows of a matrix with up to eight columns: a vector holds inputs of one row or of
// one column, and sums run along them.

#ifndef SPECJAX_FEW_COLUMNS_H_
#define SPECJAX_FEW_COLUMNS_H_

#include "bfloat16.h"
#include "tasks.h"
#include "vectors.h"

namespace {

// The inputs k ... deep - 1, which fill no vector, of `rows` by `columns` sums; and where they go.
template <typename W>
__attribute__((noinline)) void Finish(const W* w, const float* x, float* y, int64_t in,
                                      int64_t pitch, int64_t k, int64_t deep, int rows, int columns,
                                      const float* total, To to) {
  for (int r = 0; r < rows; ++r) {
    for (int m = 0; m < columns; ++m) {
      float s = total[r * columns + m];
      for (int64_t t = k; t < deep; ++t) s = Fma(Number(w[r * in + t]), x[m * pitch + t], s);
      to(y, r, m, s);
    }
  }
}

// sum[r, m] += w[r, k] x[m, k], lane by lane, over the whole vectors of inputs k ... end - 1, for R rows
// of length `in` and M columns, `pitch` apart; returns the first input that is left. The `next` rows
// are fetched meanwhile, so that reading from memory and multiplying overlap.
template <int R, int M, typename W, typename Fetching>
ALWAYS_INLINE int64_t AddFew(Vec (&sum)[R * M], const W* w, const float* x, int64_t in, int64_t pitch,
                             int64_t k, int64_t end, Fetching& next) {
  constexpr int64_t kSize = sizeof(W);
  if constexpr (std::is_same_v<W, Pair>) {
    for (; k + 2 * kLanes <= end; k += 2 * kLanes) {
      Vec even[R], odd[R];
      const bool due = k * kSize % kLine == 0 && next.Step();
      UNROLL
      for (int r = 0; r < R; ++r) {
        const IntVec both = *reinterpret_cast<const HalfPairs*>(w + r * in + k);
        even[r] = Once(reinterpret_cast<Vec>(both << 16));
        odd[r] = Once(reinterpret_cast<Vec>(both & int32_t(0xffff0000)));
        if (due) next.template Next<2>();
      }
      UNROLL
      for (int m = 0; m < M; ++m) {
        const Vec b = Once(Load(x + m * pitch + k)), c = Once(Load(x + m * pitch + k + kLanes));
        UNROLL
        for (int r = 0; r < R; ++r) sum[r * M + m] = Fma(even[r], b, sum[r * M + m]);
        UNROLL
        for (int r = 0; r < R; ++r) sum[r * M + m] = Fma(odd[r], c, sum[r * M + m]);
      }
    }
  }
  for (; k + kLanes <= end; k += kLanes) {
    Vec a[R];
    const bool due = (kSize * kLanes >= kLine || k * kSize % kLine == 0) && next.Step();
    UNROLL
    for (int r = 0; r < R; ++r) {
      a[r] = Once(Load(w + r * in + k));
      if (due) next.template Next<2>();
    }
    UNROLL
    for (int m = 0; m < M; ++m) {
      const Vec b = Once(Load(x + m * pitch + k));
      UNROLL
      for (int r = 0; r < R; ++r) sum[r * M + m] = Fma(a[r], b, sum[r * M + m]);
    }
  }
  return k;
}

// y[r, m] = the sum over the lanes of sum[r, m] and the products of inputs k ... deep - 1.
template <int R, int M, typename W>
ALWAYS_INLINE void PutFew(const Vec (&sum)[R * M], const W* w, const float* x, float* y, int64_t in,
                          int64_t pitch, int64_t k, int64_t deep, To to) {
  alignas(64) float total[(R * M + kLanes - 1) / kLanes * kLanes];
  StoreAll<R * M>(total, [&](int i) { return sum[i]; });
  if (k < deep || to.add) {
    Finish(w, x, y, in, pitch, k, deep, R, M, total, to);
  } else if (to.down == M) {  // the results lie side by side
    std::memcpy(y, total, sizeof(float) * R * M);
  } else {
    UNROLL
    for (int m = 0; m < M; ++m)
      UNROLL
      for (int r = 0; r < R; ++r) y[r * to.down + m * to.across] = total[r * M + m];
  }
}

// y[r, m] = sum_k w[r, k] x[m, k] over `deep` inputs.
template <int R, int M, typename W, typename Fetching>
ALWAYS_INLINE void Few(const W* w, const float* x, float* y, int64_t in, int64_t pitch, int64_t deep,
                       Fetching& next, To to) {
  Vec sum[R * M];
  UNROLL
  for (int i = 0; i < R * M; ++i) sum[i] = Vec{};
  const int64_t k = AddFew<R, M>(sum, w, x, in, pitch, 0, deep, next);
  PutFew<R, M>(sum, w, x, y, in, pitch, k, deep, to);
}

// The same for any number of rows. Those that come soon are fetched.
template <int M, int R, typename W>
void FewRows(const W* w, const float* x, float* y, int64_t in, int64_t pitch, int64_t deep,
             int64_t rows, To to) {
  const int64_t bytes = deep * sizeof(W);
  // by six columns or more, multiplying takes about as long as reading, and rows must not come late
  constexpr int64_t kDistance = M > 5 ? 2 * kAhead : kAhead;
  Fetch next(w + Fetch::Ahead(R, bytes, kDistance) * in, bytes, in * sizeof(W));
  int64_t r = 0;
  for (; r + R <= rows; r += R)
    Few<R, M>(w + r * in, x, y + r * to.down, in, pitch, deep, next, to);
  if constexpr (R > 1) {
    if (r < rows) FewRows<M, 1>(w + r * in, x, y + r * to.down, in, pitch, deep, rows - r, to);
  }
}

// Floats of columns up to which rows are read as a whole: more of them, loaded anew for each row, do
// not stay in the L1 cache. And the inputs at a time of longer rows.
constexpr int64_t kHeldColumns = 6 << 10, kColumnPiece = 512;

// The same for a block of rows and a share of the columns, which fetches its part of the rows that are
// `coming`. All rows meet a piece of the columns before the next one, so that it stays in the L1 cache.
template <int M, int R, typename W>
void PartRows(const W* w, const float* x, float* y, int64_t in, int64_t pitch, int64_t deep,
              int64_t rows, Soon<W> coming, ColumnShare share, To to) {
  FetchPart next(coming.row, coming.inputs * sizeof(W), in * sizeof(W), rows, share.index, share.count);
  const int64_t whole = rows / R * R, piece = M * deep <= kHeldColumns ? deep : kColumnPiece;
  alignas(64) float kept[kBlock * M * kLanes];
  for (int64_t begin = 0; begin < deep; begin += piece) {
    const int64_t end = std::min(begin + piece, deep);
    for (int64_t r = 0; r < whole; r += R) {
      float* own = kept + r * M * kLanes;
      Vec sum[R * M];
      UNROLL
      for (int i = 0; i < R * M; ++i) sum[i] = begin > 0 ? Load(own + i * kLanes) : Vec{};
      const int64_t k = AddFew<R, M>(sum, w + r * in, x, in, pitch, begin, end, next);
      if (end < deep) {
        UNROLL
        for (int i = 0; i < R * M; ++i) Store(own + i * kLanes, sum[i]);
      } else {
        PutFew<R, M>(sum, w + r * in, x, y + r * to.down, in, pitch, k, deep, to);
      }
    }
  }
  for (int64_t r = whole; r < rows; ++r)
    Few<1, M>(w + r * in, x, y + r * to.down, in, pitch, deep, next, to);
}

// How many rows meet columns at a time: at least two, except where rows are read one by one, since
// sharing the loads of columns saves more than some sums in memory cost; and two where there are seven
// or eight columns, since fewer rows side by side come faster from memory.
template <typename W>
constexpr int FewRowsOf(int columns) {
  return columns > 6 ? 2 : std::max(RowsOf(columns, std::is_same_v<W, Pair> ? 2 : 1), 2);
}

template <typename W>
using Rows = void (*)(const W*, const float*, float*, int64_t, int64_t, int64_t, int64_t, To);
template <typename W, bool kOne, int... M>
constexpr std::array<Rows<W>, sizeof...(M)> FewTable(std::integer_sequence<int, M...>) {
  return {{&FewRows<M + 1, kOne && M < 5 ? 1 : FewRowsOf<W>(M + 1), W>...}};
}
template <typename W, bool kOne>
constexpr auto kFewRows = FewTable<W, kOne>(Counts{});  // by the number of columns, less one

template <typename W>
using Parts = void (*)(const W*, const float*, float*, int64_t, int64_t, int64_t, int64_t, Soon<W>,
                       ColumnShare, To);
template <typename W, int... M>
constexpr std::array<Parts<W>, sizeof...(M)> PartTable(std::integer_sequence<int, M...>) {
  return {{&PartRows<M + kLeastShare, FewRowsOf<W>(M + kLeastShare), W>...}};
}
template <typename W>
constexpr auto kPartRows = PartTable<W>(ShareCounts{});  // by the number of columns, less kLeastShare

// Floats of a product from which on rows are read one by one by up to five columns, with AVX-512:
// memory is fastest in its own order, and so large a product mostly waits for it. In a smaller one
// rows side by side share the loads of columns.
constexpr int64_t kWaiting = kLanes == 16 ? 1 << 21 : INT64_MAX;
constexpr int64_t kHeldByOne = 5 << 10;  // floats of columns up to which that is so

// `deep` inputs of a task's rows by columns of PackRows, a few of them at a time. `after` is what
// this thread reads next.
template <bool kOne, typename W>
void FewBy(const W* w, const float* x, float* y, int64_t in, int64_t deep, int64_t rows,
           int64_t columns, Soon<W> after, To to) {
  const int64_t pitch = Pitch(in);
  EachShare(rows, columns, [&](int64_t r, int64_t height, int64_t m, int64_t few, ColumnShare share) {
    float* at = y + r * to.down + m * to.across;
    const W* row = w + r * in;
    if (share.count > 1 || (few >= kLeastShare && few * in > kHeldColumns)) {
      kPartRows<W>[few - kLeastShare](row, x + m * pitch, at, in, pitch, deep, height,
                                      share.Coming(row, in, deep, after), share, to);
    } else {
      const auto& run = few * deep <= kHeldByOne ? kFewRows<W, kOne> : kFewRows<W, false>;
      run[few - 1](row, x + m * pitch, at, in, pitch, deep, height, to);
    }
  });
}

// The rows begin ... begin + height - 1 of a weight [out, in] by columns of PackRows, `kLong` inputs
// at a time.
template <typename W, bool kOne = false>
void TaskBy(const W* weight, const float* x, float* y, int64_t out, int64_t in, int64_t begin,
            int64_t height, int64_t columns, To to) {
  for (int64_t k = 0; k < in; k += kLong, to.add = true) {
    const int64_t deep = std::min(kLong, in - k);
    const Soon<W> after = After(weight, out, in, begin, height, k, deep, kLong);
    FewBy<kOne>(weight + begin * in + k, x + k, y, in, deep, height, columns, after, to);
  }
}

}  // namespace

#endif  // SPECJAX_FEW_COLUMNS_H_
