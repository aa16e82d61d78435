// Products of a weight matrix with a few columns, attention over a cache, and argmax, for CPUs.
//
// Every function is deterministic: which thread computes a row does not change it.

#include "vectors.h"

namespace {

constexpr int kSums = kRegisters * 3 / 4;  // vectors of sums that the registers hold
constexpr int kWideRows = 6;       // rows in flight when a vector holds columns
constexpr int kSlots = 128;        // cache slots scored at a time: their keys stay in the L1 cache
constexpr float kHidden = -1e30f;  // the score of what a node may not see

typedef int32_t HalfPairs __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

// A bfloat16: the upper half of a float. A Pair is one too, in a row that is read two vectors at a
// time: those at even and those at odd places, by columns that PackRows laid out alike.
struct Half {
  uint16_t bits;
};
struct Pair : Half {};

inline Vec Load(const Half* p) {
  const HalfVec half = *reinterpret_cast<const HalfVec*>(p);
  const IntVec bits = __builtin_convertvector(half, IntVec) << 16;
  return reinterpret_cast<const Vec&>(bits);
}
inline float Number(float x) { return x; }
inline float Number(Half x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

// ---------------------------------------------------------------- products

// The inputs k ... deep - 1, which fill no vector, of `rows` by `columns` sums; and where they go.
template <typename W>
__attribute__((noinline)) void Finish(const W* w, const float* x, float* y, int64_t in, int64_t k,
                                      int64_t deep, int rows, int columns, const float* total,
                                      To to) {
  for (int r = 0; r < rows; ++r) {
    for (int m = 0; m < columns; ++m) {
      float s = total[r * columns + m];
      for (int64_t t = k; t < deep; ++t) s += Number(w[r * in + t]) * x[m * in + t];
      to(y, r, m, s);
    }
  }
}

// y[r, m] = sum_k w[r, k] x[m, k] over `deep` inputs, for R rows and M columns of length `in`. The
// rows `ahead` are fetched meanwhile, so that reading from memory and multiplying overlap.
template <int R, int M, typename W>
ALWAYS_INLINE void Few(const W* w, const float* x, float* y, int64_t in, int64_t deep,
                       int64_t ahead, To to) {
  Vec sum[R * M];
  UNROLL
  for (int i = 0; i < R * M; ++i) sum[i] = Vec{};
  int64_t k = 0;
  if constexpr (std::is_same_v<W, Pair>) {
    for (; k + 2 * kLanes <= deep; k += 2 * kLanes) {
      Vec even[R], odd[R];
      UNROLL
      for (int r = 0; r < R; ++r) {
        const IntVec both = *reinterpret_cast<const HalfPairs*>(w + r * in + k);
        even[r] = Once(reinterpret_cast<Vec>(both << 16));
        odd[r] = Once(reinterpret_cast<Vec>(both & int32_t(0xffff0000)));
        __builtin_prefetch(w + (r + ahead) * in + k);
      }
      UNROLL
      for (int m = 0; m < M; ++m) {
        const Vec b = Once(Load(x + m * in + k)), c = Once(Load(x + m * in + k + kLanes));
        UNROLL
        for (int r = 0; r < R; ++r) sum[r * M + m] = Fma(even[r], b, sum[r * M + m]);
        UNROLL
        for (int r = 0; r < R; ++r) sum[r * M + m] = Fma(odd[r], c, sum[r * M + m]);
      }
    }
  }
  for (; k + kLanes <= deep; k += kLanes) {
    Vec a[R];
    UNROLL
    for (int r = 0; r < R; ++r) {
      a[r] = Once(Load(w + r * in + k));
      __builtin_prefetch(w + (r + ahead) * in + k);
    }
    UNROLL
    for (int m = 0; m < M; ++m) {
      const Vec b = Once(Load(x + m * in + k));
      UNROLL
      for (int r = 0; r < R; ++r) sum[r * M + m] = Fma(a[r], b, sum[r * M + m]);
    }
  }
  alignas(64) float total[(R * M + kLanes - 1) / kLanes * kLanes];
  StoreAll<R * M>(total, [&](int i) { return sum[i]; });
  if (k < deep || to.add) {
    Finish(w, x, y, in, k, deep, R, M, total, to);
  } else if (to.down == M) {  // the results lie side by side
    std::memcpy(y, total, sizeof(float) * R * M);
  } else {
    UNROLL
    for (int m = 0; m < M; ++m)
      UNROLL
      for (int r = 0; r < R; ++r) y[r * to.down + m * to.across] = total[r * M + m];
  }
}

template <int M, int R, typename W>
void FewRows(const W* w, const float* x, float* y, int64_t in, int64_t deep, int64_t rows, To to) {
  const int64_t ahead = std::max<int64_t>(R, kAhead / deep);
  int64_t r = 0;
  for (; r + R <= rows; r += R) Few<R, M>(w + r * in, x, y + r * to.down, in, deep, ahead, to);
  for (; r < rows; ++r) Few<1, M>(w + r * in, x, y + r * to.down, in, deep, ahead, to);
}

template <typename W>
using Rows = void (*)(const W*, const float*, float*, int64_t, int64_t, int64_t, To);
template <typename W, int... M>
constexpr std::array<Rows<W>, sizeof...(M)> FewTable(std::integer_sequence<int, M...>) {
  return {{&FewRows<M + 1, RowsOf(M + 1, std::is_same_v<W, Pair> ? 2 : 1), W>...}};
}
template <typename W>
constexpr auto kFewRows = FewTable<W>(Counts{});  // by the number of columns, less one

// y[r, lane] = sum_k w[r * row + k * step] x[k, lane]: a vector holds columns.
template <int R>
inline void Wide(const float* w, int64_t row, int64_t step, const float* x, int64_t in, Vec* y) {
  Vec sum[R];
  UNROLL
  for (int r = 0; r < R; ++r) sum[r] = Vec{};
  for (int64_t k = 0; k < in; ++k) {
    const Vec b = Load(x + k * kLanes);
    UNROLL
    for (int r = 0; r < R; ++r) sum[r] += w[r * row + k * step] * b;
  }
  UNROLL
  for (int r = 0; r < R; ++r) y[r] = sum[r];
}

// The same for rows that are read from memory: those after them are fetched ahead. Two sums a row
// halve the rounding.
template <int R>
inline void WideAhead(const float* w, const float* x, int64_t in, int64_t deep, Vec* y) {
  Vec even[R], odd[R];
  UNROLL
  for (int r = 0; r < R; ++r) even[r] = odd[r] = Vec{};
  int64_t k = 0;
  for (; k + 16 <= deep; k += 16) {
    UNROLL
    for (int r = 0; r < R; ++r) __builtin_prefetch(w + (r + R) * in + k);
    UNROLL
    for (int j = 0; j < 16; j += 2) {
      const Vec b = Load(x + (k + j) * kLanes), c = Load(x + (k + j + 1) * kLanes);
      UNROLL
      for (int r = 0; r < R; ++r) even[r] += w[r * in + k + j] * b;
      UNROLL
      for (int r = 0; r < R; ++r) odd[r] += w[r * in + k + j + 1] * c;
    }
  }
  for (; k < deep; ++k) {
    const Vec b = Load(x + k * kLanes);
    UNROLL
    for (int r = 0; r < R; ++r) even[r] += w[r * in + k] * b;
  }
  UNROLL
  for (int r = 0; r < R; ++r) y[r] = even[r] + odd[r];
}

// `rows` rows of a weight matrix, `stride` apart, by packed columns; the rows stay in the L1 cache
// meanwhile.
void WideRows(const float* w, int64_t stride, const float* packed, float* y, int64_t in,
              int64_t deep, int64_t rows, int64_t columns, To to) {
  for (int64_t r = 0; r < rows; r += kWideRows) {
    const int64_t n = std::min<int64_t>(kWideRows, rows - r);
    for (int64_t m = 0; m < columns; m += kLanes) {
      Vec sums[kWideRows];
      if (n == kWideRows) {
        WideAhead<kWideRows>(w + r * stride, packed + m * in, stride, deep, sums);
      } else {
        for (int64_t i = 0; i < n; ++i)
          WideAhead<1>(w + (r + i) * stride, packed + m * in, stride, deep, sums + i);
      }
      for (int64_t i = 0; i < n; ++i)
        for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, columns - m); ++lane)
          to(y, r + i, m + lane, sums[i][lane]);
    }
  }
}

// The same of bfloat16: a row's numbers are spread over lanes one by one, so they are made floats.
void WideRows(const Half* w, int64_t stride, const float* packed, float* y, int64_t in,
              int64_t deep, int64_t rows, int64_t columns, To to) {
  float* whole = Scratch(1, 2 * kWideRows * deep);  // room for what is fetched ahead
  for (int64_t r = 0; r < rows; r += kWideRows) {
    const int64_t n = std::min<int64_t>(kWideRows, rows - r);
    for (int64_t i = 0; i < n; ++i) {
      const Half* from = w + (r + i) * stride;
      int64_t k = 0;
      for (; k + kLanes <= deep; k += kLanes) Store(whole + i * deep + k, Load(from + k));
      for (; k < deep; ++k) whole[i * deep + k] = Number(from[k]);
    }
    WideRows(whole, deep, packed, y + r * to.down, in, deep, n, columns, to);
  }
}

// x [in, columns] -> blocks of kLanes columns, each [in, kLanes], times `scale`; zeros fill up.
float* PackWide(int slot, const float* x, int64_t in, int64_t columns, float scale) {
  const int64_t blocks = (columns + kLanes - 1) / kLanes;
  float* packed = Scratch(slot, blocks * in * kLanes);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t n = std::min<int64_t>(kLanes, columns - b * kLanes);
    for (int64_t k = 0; k < in; ++k) {
      float* to = packed + (b * in + k) * kLanes;
      for (int64_t m = 0; m < n; ++m) to[m] = x[k * columns + b * kLanes + m] * scale;
      for (int64_t m = n; m < kLanes; ++m) to[m] = 0.0f;
    }
  }
  return packed;
}

// A task's rows of a weight matrix by columns of PackRows, a few of them at a time.
template <typename W>
void FewBy(const W* w, const float* x, float* y, int64_t in, int64_t deep, int64_t rows,
           int64_t columns, To to) {
  const int64_t parts = (columns + kFew - 1) / kFew;
  for (int64_t r = 0; r < rows; r += kBlock) {
    for (int64_t part = 0, m = 0; part < parts; ++part) {
      const int64_t end = columns * (part + 1) / parts;
      kFewRows<W>[end - m - 1](w + r * in, x + m * in, y + r * to.down + m * to.across, in, deep,
                               std::min(kBlock, rows - r), to);
      m = end;
    }
  }
}

// The same, by `x` as the number of columns asks for it.
template <typename W>
void RowsBy(const W* w, const float* x, float* y, int64_t in, int64_t deep, int64_t rows,
            int64_t columns, bool wide, To to) {
  if (wide) {
    WideRows(w, in, x, y, in, deep, rows, columns, to);
  } else {
    FewBy(w, x, y, in, deep, rows, columns, to);
  }
}

// x [in, columns], weights [out, in] -> results [out, columns] each, or, with `transpose_out`, [columns, out].
// Weights are float32 or bfloat16, whose products are those of the floats that they stand for.
// One call for all weights that meet the same x: a small product costs little more than its call.
ffi::Error Products(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                    bool transpose_out, ffi::RemainingRets results) {
  struct Part {
    const void* weight;
    bool half;
    float* result;
    int64_t out, tasks;
  };
  constexpr size_t kMost = 8;
  std::array<Part, kMost> parts;
  const size_t count = weights.size();
  size_t halves = 0;
  if (count > kMost) return ffi::Error::InvalidArgument("products: at most 8 weights");
  const int64_t in = x.dimensions()[0], columns = x.dimensions()[1];
  int64_t total = 0, total_bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    auto weight = weights.get<ffi::AnyBuffer>(i);
    auto result = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!weight || !result) return ffi::Error::InvalidArgument("products: buffers");
    const int64_t out = weight->dimensions()[0];
    const bool half = weight->element_type() == ffi::BF16;
    halves += half;
    parts[i] = Part{weight->untyped_data(), half, (*result)->typed_data(), out, 0};
    total += out;
    total_bytes += out * in * (half ? 2 : 4);
  }
  const float* from = x.typed_data();
  // a vector of columns wastes the lanes that they do not fill
  const bool wide = columns > kFew && 4 * columns > 3 * ((columns + kLanes - 1) / kLanes * kLanes);
  const float* packed;
  const bool pairs = !wide && halves == count;
  packed = wide ? PackWide(0, from, in, columns, 1.0f) : PackRows(from, in, columns, pairs);
  const int64_t rows = TaskRows(pool, total_bytes, total);
  const int64_t deep = wide ? kDeep / 2 : kDeep;
  const int64_t tasks = DivideParts(parts.data(), count, rows);
  Parallel(pool, tasks, [=](int64_t task) {
    const auto [part, begin, height] = ShareOf(parts.data(), task, rows);
    To to{transpose_out ? 1 : columns, transpose_out ? part->out : 1, false};
    float* y = part->result + begin * to.down;
    for (int64_t k = 0; k < in; k += deep, to.add = true) {
      const int64_t d = std::min(deep, in - k), at = begin * in + k;
      const float* x = packed + k * (wide ? kLanes : 1);
      if (pairs) {
        FewBy(static_cast<const Pair*>(part->weight) + at, x, y, in, d, height, columns, to);
      } else if (part->half) {
        RowsBy(static_cast<const Half*>(part->weight) + at, x, y, in, d, height, columns, wide, to);
      } else {
        RowsBy(static_cast<const float*>(part->weight) + at, x, y, in, d, height, columns, wide, to);
      }
    }
  });
  return ffi::Error::Success();
}

// ---------------------------------------------------------------- attention

// a where either is no number: the running maximum stays one, and Exp passes NaN on.
inline Vec Max(Vec a, Vec b) { return a < b ? b : a; }

// e^x for x <= 0, relative error below 2e-7 (Cephes); 0 below -87.
inline Vec Exp(Vec x) {
  const Vec low = Vec{} - 87.0f;
  const IntVec dead = x < low;
  x = Max(x, low);
  const Vec turns = x * 1.44269504088896341f - 0.5f;
  const IntVec n = __builtin_convertvector(turns, IntVec);  // towards zero: rounds, since x <= 0
  const Vec f = __builtin_convertvector(n, Vec);
  const Vec r = (x - f * 0.693359375f) + f * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec bits = (n + 127) << 23;
  const Vec scaled = p * reinterpret_cast<const Vec&>(bits);
  return dead ? Vec{} : scaled;
}

// One key/value head of one row: a running softmax over blocks of slots (2205.14135, forward).
struct Head {
  int64_t size, columns, nodes;
  const float* query;  // packed, [blocks, size, lanes]
  float* out;          // unnormalised, [blocks, size, lanes]
  float* stats;        // running maximum and sum, [blocks, 2, lanes]

  // `mask` [count, nodes], or null: all are seen. Column c is about node c % nodes.
  void Add(const float* keys, const float* values, int64_t count, const bool* mask) {
    alignas(64) float scores[kSlots * kLanes];
    for (int64_t b = 0; b * kLanes < columns; ++b) {
      const float* q = query + b * size * kLanes;
      int64_t s = 0;
      Vec* to = reinterpret_cast<Vec*>(scores);
      for (; s + 8 <= count; s += 8) Wide<8>(keys + s * size, size, 1, q, size, to + s);
      for (; s < count; ++s) Wide<1>(keys + s * size, size, 1, q, size, to + s);
      if (mask != nullptr)
        for (s = 0; s < count; ++s)
          for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, columns - b * kLanes); ++lane)
            if (!mask[s * nodes + (b * kLanes + lane) % nodes]) scores[s * kLanes + lane] = kHidden;
      Vec top = Load(stats + 2 * b * kLanes), sum = Load(stats + (2 * b + 1) * kLanes);
      const Vec before = top;
      for (s = 0; s < count; ++s) top = Max(top, to[s]);
      const Vec fade = Exp(before - top);
      sum *= fade;
      for (s = 0; s < count; ++s) sum += to[s] = Exp(to[s] - top);
      Store(stats + 2 * b * kLanes, top);
      Store(stats + (2 * b + 1) * kLanes, sum);
      float* o = out + b * size * kLanes;
      int64_t e = 0;
      const auto keep = [&](int64_t from, int64_t rows, const Vec* fresh) {
        for (int64_t i = 0; i < rows; ++i) {
          float* at = o + (from + i) * kLanes;
          Store(at, Load(at) * fade + fresh[i]);
        }
      };
      Vec fresh[16];
      for (; e + 16 <= size; e += 16) {
        Wide<16>(values + e, 1, size, scores, count, fresh);
        keep(e, 16, fresh);
      }
      for (; e < size; ++e) {
        Wide<1>(values + e, 1, size, scores, count, fresh);
        keep(e, 1, fresh);
      }
    }
  }
};

// The same where the columns would leave most lanes empty: a vector holds features, then slots.
template <int M>
struct FewHead {
  int64_t size, nodes;
  const float* query;  // [M, size]
  float* out;          // unnormalised, [M, size], then as much room
  float* stats;        // running maximum and sum, [2, M]

  void Add(const float* keys, const float* values, int64_t count, const bool* mask) {
    alignas(64) float scores[M * kSlots];
    constexpr int R = M < kLanes ? kLanes / M : 1;  // fills a vector of sums
    FewRows<M, R>(keys, query, scores, size, size, count, To{1, kSlots, false});
    float fades[M];
    for (int m = 0; m < M; ++m) {
      float* column = scores + m * kSlots;
      if (mask != nullptr)
        for (int64_t s = 0; s < count; ++s)
          if (!mask[s * nodes + m % nodes]) column[s] = kHidden;
      for (int64_t s = count; s % kLanes; ++s) column[s] = kHidden;
      Vec top = Vec{} + stats[m], sum = {};
      for (int64_t s = 0; s < count; s += kLanes) top = Max(top, Load(column + s));
      float highest = top[0];
      for (int i = 1; i < kLanes; ++i) highest = highest < top[i] ? top[i] : highest;
      for (int64_t s = 0; s < count; s += kLanes) {
        const Vec p = Exp(Load(column + s) - highest);
        Store(column + s, p);
        sum += p;
      }
      // what fills up the last vector is far below any score, but not below a hidden one
      for (int64_t s = count; s % kLanes; ++s) sum[s % kLanes] -= column[s];
      fades[m] = Exp(Vec{} + (stats[m] - highest))[0];
      float total = 0;
      for (int i = 0; i < kLanes; ++i) total += sum[i];
      stats[m] = highest;
      stats[M + m] = stats[M + m] * fades[m] + total;
    }
    float* fresh = out + M * size;
    int64_t e = 0;
    for (; e + 4 * kLanes <= size; e += 4 * kLanes) Weigh<4>(scores, values + e, count, fresh + e);
    for (; e + kLanes <= size; e += kLanes) Weigh<1>(scores, values + e, count, fresh + e);
    if (e < size && size >= kLanes) {  // the last vector overlaps the one before it
      e = size - kLanes;
      Weigh<1>(scores, values + e, count, fresh + e);
    } else {
      for (; e < size; ++e) {
        for (int m = 0; m < M; ++m) {
          float s = 0;
          for (int64_t t = 0; t < count; ++t) s += scores[m * kSlots + t] * values[t * size + e];
          fresh[m * size + e] = s;
        }
      }
    }
    for (int m = 0; m < M; ++m)
      for (e = m * size; e < (m + 1) * size; ++e) out[e] = out[e] * fades[m] + fresh[e];
  }

  // V vectors of features of every column.
  template <int V>
  void Weigh(const float* scores, const float* values, int64_t count, float* to) const {
    // vectors at a time; two of them halve how often scores are read
    constexpr int N = V * M <= kSums ? V : V % 2 == 0 && 2 * M <= kSums ? 2 : 1;
    for (int v = 0; v < V; v += N) {
      Vec sum[M * N];
      UNROLL
      for (int i = 0; i < M * N; ++i) sum[i] = Vec{};
      for (int64_t s = 0; s < count; ++s) {
        UNROLL
        for (int i = 0; i < N; ++i) {
          const Vec value = Once(Load(values + s * size + (v + i) * kLanes));
          UNROLL
          for (int m = 0; m < M; ++m) sum[m * N + i] += scores[m * kSlots + s] * value;
        }
      }
      UNROLL
      for (int m = 0; m < M; ++m)
        UNROLL
        for (int i = 0; i < N; ++i) Store(to + m * size + (v + i) * kLanes, sum[m * N + i]);
    }
  }
};

// One head of one row: its query and result [size, columns], `used` slots of the cache, then `own`.
struct Slots {
  const float *keys, *values;
  int64_t count;
  const bool* mask;
};

template <typename H>
void AddAll(H& head, const std::array<Slots, 2>& both) {
  for (const Slots& part : both)
    for (int64_t s = 0; s < part.count; s += kSlots)
      head.Add(part.keys + s * head.size, part.values + s * head.size,
               std::min<int64_t>(kSlots, part.count - s),
               part.mask == nullptr ? nullptr : part.mask + s * head.nodes);
}

void WideHead(const float* query, int64_t size, int64_t columns, int64_t nodes,
              const std::array<Slots, 2>& both, float* result) {
  const int64_t blocks = (columns + kLanes - 1) / kLanes;
  const float* packed = PackWide(1, query, size, columns, 1 / std::sqrt(float(size)));
  Head h{size,   columns, nodes,
         packed, Scratch(2, blocks * size * kLanes), Scratch(3, blocks * 2 * kLanes)};
  std::fill_n(h.out, blocks * size * kLanes, 0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    std::fill_n(h.stats + 2 * b * kLanes, kLanes, kHidden);
    std::fill_n(h.stats + (2 * b + 1) * kLanes, kLanes, 0.0f);
  }
  AddAll(h, both);
  for (int64_t b = 0; b < blocks; ++b) {
    const Vec part = 1.0f / Load(h.stats + (2 * b + 1) * kLanes);
    for (int64_t e = 0; e < size; ++e) {
      const Vec o = Load(h.out + (b * size + e) * kLanes) * part;
      for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, columns - b * kLanes); ++lane)
        result[e * columns + b * kLanes + lane] = o[lane];
    }
  }
}

template <int M>
void NarrowHead(const float* query, int64_t size, int64_t nodes, const std::array<Slots, 2>& both,
                float* result) {
  float *q = Scratch(1, M * size), stats[2 * M];
  const float scale = 1 / std::sqrt(float(size));
  for (int64_t e = 0; e < size; ++e)
    for (int m = 0; m < M; ++m) q[m * size + e] = query[e * M + m] * scale;
  FewHead<M> h{size, nodes, q, Scratch(2, 2 * M * size), stats};
  std::fill_n(h.out, M * size, 0.0f);
  std::fill_n(stats, M, kHidden);
  std::fill_n(stats + M, M, 0.0f);
  AddAll(h, both);
  for (int64_t e = 0; e < size; ++e)
    for (int m = 0; m < M; ++m) result[e * M + m] = h.out[m * size + e] / stats[M + m];
}

using Narrow = void (*)(const float*, int64_t, int64_t, const std::array<Slots, 2>&, float*);
template <int... M>
constexpr std::array<Narrow, sizeof...(M)> NarrowTable(std::integer_sequence<int, M...>) {
  return {{&NarrowHead<M + 1>...}};
}
constexpr auto kNarrow = NarrowTable(Counts{});

// query [B, K, E, G, N], keys and values [B, K, S, E], own keys and values [B, K, M, E],
// mask [B or 1, M, N], length [B] -> [B, K, E, G, N]. Slots from `length` on are not read.
ffi::Error Attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> keys,
                     ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::F32> own_keys,
                     ffi::Buffer<ffi::F32> own_values, ffi::Buffer<ffi::PRED> mask,
                     ffi::Buffer<ffi::S32> length, ffi::ResultBuffer<ffi::F32> out) {
  const auto dims = query.dimensions();
  const int64_t batch = dims[0], heads = dims[1], size = dims[2], nodes = dims[4];
  const int64_t columns = dims[3] * nodes, slots = keys.dimensions()[2];
  const int64_t own = own_keys.dimensions()[2];
  const int64_t mask_step = mask.dimensions()[0] == 1 ? 0 : own * nodes;
  const float *q = query.typed_data(), *k = keys.typed_data(), *v = values.typed_data();
  const float *ok = own_keys.typed_data(), *ov = own_values.typed_data();
  const bool* seen = mask.typed_data();
  const int32_t* lengths = length.typed_data();
  float* result = out->typed_data();

  const auto head = [=](int64_t task) {
    const int64_t row = task / heads, used = std::clamp<int64_t>(lengths[row], 0, slots);
    const int64_t at = task * slots * size, own_at = task * own * size;
    const float* from = q + task * size * columns;
    float* to = result + task * size * columns;
    const std::array<Slots, 2> both = {{{k + at, v + at, used, nullptr},
                                        {ok + own_at, ov + own_at, own, seen + row * mask_step}}};
    if (columns <= kFew) {
      kNarrow[columns - 1](from, size, nodes, both, to);
    } else {
      WideHead(from, size, columns, nodes, both, to);
    }
  };
  // multiplications of vectors; where a vector holds features, its sums cost twice as much again
  const int64_t a_slot = columns <= kFew ? (columns * size * 4 + kLanes - 1) / kLanes
                                         : (columns + kLanes - 1) / kLanes * size * 2;
  int64_t work = 0;
  for (int64_t row = 0; row < batch; ++row)
    work += heads * (std::clamp<int64_t>(lengths[row], 0, slots) + own) * a_slot;
  if (work < 16'000) {  // some 6 microseconds; longer ones find and keep the threads awake
    for (int64_t task = 0; task < batch * heads; ++task) head(task);
  } else {
    Parallel(pool, batch * heads, head);
  }
  return ffi::Error::Success();
}

// ---------------------------------------------------------------- the greatest

// The first index of the greatest of n numbers; -1 where that is not finite, or one is no number.
int32_t Greatest(const float* x, int64_t n) {
  constexpr float kInfinity = __builtin_inff();
  Vec tops = Vec{} - kInfinity, sum = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = Load(x + i);
    tops = tops > v ? tops : v;
    sum += v * 0.0f;  // stays zero unless a number is infinite or none
  }
  float top = -kInfinity, odd = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    top = std::max(top, tops[lane]);
    odd += sum[lane];
  }
  for (int64_t t = i; t < n; ++t) {
    top = std::max(top, x[t]);
    odd += x[t] * 0.0f;
  }
  if (odd != 0) {  // numbers of minus infinity are no matter
    for (int64_t t = 0; t < n; ++t)
      if (!(x[t] < kInfinity)) return -1;
    top = *std::max_element(x, x + n);
    if (top == -kInfinity) return -1;
  }
  for (int64_t t = 0;; t += kLanes) {
    if (t + kLanes <= n) {
      const IntVec same = Load(x + t) == top;
      int32_t any = 0;
      for (int lane = 0; lane < kLanes; ++lane) any |= same[lane];
      if (!any) continue;
    }
    while (x[t] != top) ++t;
    return static_cast<int32_t>(t);
  }
}

// x [..., V] -> [...].
ffi::Error Argmax(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::S32> out) {
  const int64_t size = x.dimensions().back(), rows = out->element_count();
  const float* from = x.typed_data();
  int32_t* to = out->typed_data();
  const auto row = [=](int64_t r) { to[r] = Greatest(from + r * size, size); };
  if (rows * size < 200'000) {
    for (int64_t r = 0; r < rows; ++r) row(r);
  } else {
    Parallel(pool, rows, row);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxArgmax, Argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxProducts, Products, BindProducts());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxAttention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
