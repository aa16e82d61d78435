// Products of weight matrices with many columns, as of a prompt: by the processor's tiles
// (amx_floats.h), or else by tiles of rows and columns whose sums stay in registers, while inputs go by
// one after the other.

#ifndef SPECJAX_MANY_COLUMNS_H_
#define SPECJAX_MANY_COLUMNS_H_

#include "amx_floats.h"
#include "bfloat16.h"
#include "tasks.h"
#include "vectors.h"

namespace {

constexpr int kTileRows = 6, kTileVectors = kRegisters == 32 ? 4 : 2;  // of sums in registers
constexpr int64_t kTileColumns = kTileVectors * kLanes;
constexpr int64_t kInputs = 128;  // at a time, so that their columns of a tile stay in the L1 cache
constexpr int64_t kPiece = 256;   // columns at a time, so that those of all inputs stay in the L2
constexpr int64_t kRowsOfTask = 96;

// Columns of x, `pitch` apart, -> inputs first ... last - 1 of [tiles, in, kTileColumns]; zeros fill
// up.
inline void PackTile(const float* x, int64_t pitch, int64_t columns, int64_t in, int64_t first,
                     int64_t last, float* packed) {
  for (int64_t m = 0; m < columns; m += kTileColumns) {
    const int64_t held = std::min(kTileColumns, columns - m);
    for (int64_t k = first; k < last; ++k) {
      float* to = packed + m * in + k * kTileColumns;
      std::memcpy(to, x + k * pitch + m, sizeof(float) * held);
      std::fill(to + held, to + kTileColumns, 0.0f);
    }
  }
}

// The inputs that follow of the rows that are summed: where the first columns meet the rows, a line
// of each is fetched with every `inputs` inputs, since the weights of a prompt of a few dozen tokens
// are awaited longer than they are multiplied.
struct Following {
  Fetch* fetch;
  int64_t inputs;
};

// Sums of R rows, `stride` apart, and V vectors of columns over `inputs`, added to y [R, columns]
// or put there.
template <int R, int V>
ALWAYS_INLINE void SumTile(const float* w, int64_t stride, const float* x, int64_t inputs, float* y,
                           int64_t pitch, bool add, Following next) {
  Vec sum[R * V];
  UNROLL
  for (int i = 0; i < R * V; ++i) sum[i] = Vec{};
  for (int64_t k = 0; k < inputs; ++k) {
    if (next.fetch != nullptr && k % next.inputs == 0) {
      UNROLL
      for (int r = 0; r < R; ++r) next.fetch->Next();
    }
    Vec b[V];
    UNROLL
    for (int v = 0; v < V; ++v) b[v] = Once(Load(x + k * kTileColumns + v * kLanes));
    UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec a = All(w[r * stride + k]);
      UNROLL
      for (int v = 0; v < V; ++v) sum[r * V + v] = Fma(a, b[v], sum[r * V + v]);
    }
  }
  UNROLL
  for (int r = 0; r < R; ++r) {
    UNROLL
    for (int v = 0; v < V; ++v) {
      float* at = y + r * pitch + v * kLanes;
      Store(at, add ? Load(at) + sum[r * V + v] : sum[r * V + v]);
    }
  }
}

template <int V>
void SumRows(const float* w, int64_t stride, const float* x, int64_t inputs, int64_t rows, float* y,
             int64_t pitch, bool add, Following next) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows)
    SumTile<kTileRows, V>(w + r * stride, stride, x, inputs, y + r * pitch, pitch, add, next);
  for (; r + 2 <= rows; r += 2)
    SumTile<2, V>(w + r * stride, stride, x, inputs, y + r * pitch, pitch, add, next);
  if (r < rows) SumTile<1, V>(w + r * stride, stride, x, inputs, y + r * pitch, pitch, add, next);
}

using SumsOfRows = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t,
                            bool, Following);
template <int... V>
constexpr std::array<SumsOfRows, sizeof...(V)> SumTable(std::integer_sequence<int, V...>) {
  return {{&SumRows<V + 1>...}};
}
constexpr auto kSumRows = SumTable(std::make_integer_sequence<int, kTileVectors>{});

// The rows of a block of weights, `stride` apart, as floats: those that stand there, or, of
// bfloat16, widened into the thread's memory. Returns them, and sets how far apart they are.
inline const float* AsFloats(const float* w, int64_t, int64_t, int64_t*) { return w; }
inline const float* AsFloats(const Half* w, int64_t rows, int64_t inputs, int64_t* stride) {
  float* to = Scratch(2, kRowsOfTask * kInputs);
  for (int64_t r = 0; r < rows; ++r) {
    const Half* from = w + r * *stride;
    int64_t k = 0;
    for (; k + kLanes <= inputs; k += kLanes) Store(to + r * kInputs + k, Load(from + k));
    for (; k < inputs; ++k) to[r * kInputs + k] = Number(from[k]);
  }
  *stride = kInputs;
  return to;
}

// Rows of weights [height, in] and packed columns -> y [height, pitch].
template <typename Weight>
void ManySums(const Weight* weight, const float* packed, int64_t in, int64_t height,
              int64_t columns, float* y, int64_t pitch) {
  for (int64_t k = 0; k < in; k += kInputs) {
    const int64_t inputs = std::min(kInputs, in - k);
    int64_t stride = in;
    const float* w = AsFloats(weight + k, height, inputs, &stride);
    const int64_t left = std::min(kInputs, in - k - inputs), size = sizeof(Weight);
    Fetch fetch(weight + k + inputs, left * size, in * size);
    for (int64_t m = 0; m < columns; m += kTileColumns) {
      const int64_t vectors = (std::min(kTileColumns, columns - m) + kLanes - 1) / kLanes;
      const float* x = packed + m * in + k * kTileColumns;
      kSumRows[vectors - 1](w, stride, x, inputs, height, y + m, pitch, k > 0,
                             {m == 0 && left > 0 ? &fetch : nullptr, kLine / size});
    }
  }
}

// x [in, columns], weights [out, in] -> results [out, columns] each, or, with `transpose_out`,
// [columns, out]. Weights are all float32, or all bfloat16, whose products are those of the floats
// that they stand for; all else is float32. A column's sum does not depend on the others: the sums of
// 128 inputs each are added one after the other.
Problem ManyProducts(ThreadPool pool, In<kF32> x, Ins weights, bool transpose_out, Outs results) {
  FloatParts read;
  if (const Problem problem = read.Read(weights, results)) return problem;
  auto& parts = read.parts;
  const bool half = read.half;
  const int64_t in = x.dims[0], all = x.dims[1];
  const int64_t tasks = DivideParts(parts.data(), weights.size, kRowsOfTask);
  for (int64_t first = 0; first < all; first += kPiece) {
    const int64_t columns = std::min(kPiece, all - first);
    const int64_t wide = (columns + kTileColumns - 1) / kTileColumns * kTileColumns;
    const float* from = x.data<const float>() + first;
#if defined(SPECJAX_TILES)
    const bool tiles = HasFloatTiles();
    float* packed = Scratch(0, tiles ? PackedFloats(in, wide) : wide * in);
#else
    float* packed = Scratch(0, wide * in);
#endif
    Parallel(pool, (in + kInputs - 1) / kInputs, [=](int64_t block) {
      const int64_t k = block * kInputs, end = std::min(k + kInputs, in);
#if defined(SPECJAX_TILES)
      if (tiles) {
        const int64_t first = k / kTileInputs, last = (end + kTileInputs - 1) / kTileInputs;
        PackPlanes(from, all, in, columns, first, last, reinterpret_cast<uint16_t*>(packed));
        return;
      }
#endif
      PackTile(from, all, columns, in, k, end, packed);
    });
    Parallel(pool, tasks, [=](int64_t task) {
      const auto [part, begin, height] = ShareOf(parts.data(), task, kRowsOfTask);
      // sums of whole vectors go where they belong, others by way of the thread's memory
      const bool straight = !transpose_out && columns % kLanes == 0;
      float* y = straight ? part->result + begin * all + first : Scratch(1, height * wide);
      const int64_t pitch = straight ? all : wide;
      const auto sum = [&](const auto* weight) {
#if defined(SPECJAX_TILES)
        if (tiles) {
          FloatTiles(weight, reinterpret_cast<const uint16_t*>(packed), in, height, columns, y, pitch);
          return;
        }
#endif
        ManySums(weight, packed, in, height, columns, y, pitch);
      };
      if (half) {
        sum(static_cast<const Half*>(part->weight) + begin * in);
      } else {
        sum(static_cast<const float*>(part->weight) + begin * in);
      }
      if (straight) return;
      for (int64_t r = 0; r < height; ++r) {
        if (transpose_out) {
          float* to = part->result + first * part->out + begin + r;
          for (int64_t m = 0; m < columns; ++m) to[m * part->out] = y[r * wide + m];
        } else {
          float* to = part->result + (begin + r) * all + first;
          std::memcpy(to, y + r * wide, sizeof(float) * columns);
        }
      }
    });
  }
  return nullptr;
}

}  // namespace

#endif  // SPECJAX_MANY_COLUMNS_H_
