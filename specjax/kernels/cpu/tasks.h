// How the kernels divide their work: tasks on the backend's threads, and shares of a task.

#ifndef SPECJAX_TASKS_H_
#define SPECJAX_TASKS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "call.h"
#include "vectors.h"

namespace {

constexpr int64_t kChunkBytes = 1024 << 10, kLeastBytes = 48 << 10;  // of weights, a task

// Runs body(0 ... tasks-1) on the backend's threads. Each has a stretch of tasks, which it takes in
// their order, since many tasks fetch what the next one reads; then it helps the others. The caller
// takes tasks as well and never waits for a thread that has not begun, so a busy pool costs nothing
// but its help.
template <typename Body>
void Parallel(ThreadPool& pool, int64_t tasks, const Body& body) {
  const int64_t threads = std::min<int64_t>(pool.num_threads(), tasks);
  if (threads <= 1) {
    for (int64_t i = 0; i < tasks; ++i) body(i);
    return;
  }
  struct Shared {
    explicit Shared(int64_t threads) : taken(threads) {}
    struct alignas(64) Count {
      std::atomic<int64_t> value{0};
    };
    std::vector<Count> taken;  // of each stretch
    std::atomic<int64_t> done{0};
  };
  auto shared = std::make_shared<Shared>(threads);  // a late thread still finds it, and nothing to do
  const auto work = [threads, tasks, &body](Shared& shared, int64_t own) {
    for (int64_t i = 0; i < threads; ++i) {
      const int64_t at = (own + i) % threads, begin = tasks * at / threads;
      const int64_t count = tasks * (at + 1) / threads - begin;
      for (int64_t task; (task = shared.taken[at].value.fetch_add(1)) < count;) {
        body(begin + task);
        shared.done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  for (int64_t t = 1; t < threads; ++t) pool.Schedule([shared, work, t] { work(*shared, t); });
  work(*shared, 0);
  while (shared->done.load(std::memory_order_acquire) < tasks) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

// Runs row(0 ... rows-1), each over `size` numbers: on several threads from `least` numbers on, below
// which waking them costs more than they help.
template <typename Row>
void EachRow(ThreadPool& pool, int64_t rows, int64_t size, int64_t least, const Row& row) {
  if (rows * size < least) {
    for (int64_t r = 0; r < rows; ++r) row(r);
  } else {
    Parallel(pool, rows, row);
  }
}

// How many rows of weights a task computes, for weights of `bytes` bytes and `rows` rows in all: a
// multiple of `block`.
inline int64_t TaskRows(const ThreadPool& pool, int64_t bytes, int64_t rows,
                        int64_t block = kBlock) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), row_bytes = bytes / rows;
  const int64_t task_bytes = std::clamp(bytes / (4 * threads), kLeastBytes, kChunkBytes);
  return std::max<int64_t>(1, task_bytes / row_bytes / block) * block;
}

// Divides `count` parts, each of which has `out` rows, into `tasks` of so many rows; returns how
// many tasks there are.
template <typename Part>
int64_t DivideParts(Part* parts, size_t count, int64_t rows) {
  int64_t tasks = 0;
  for (size_t i = 0; i < count; ++i) tasks += parts[i].tasks = (parts[i].out + rows - 1) / rows;
  return tasks;
}

// The rows begin ... begin + height - 1 of a part, which are those of one task.
template <typename Part>
struct Share {
  const Part* part;
  int64_t begin, height;
};
template <typename Part>
Share<Part> ShareOf(const Part* parts, int64_t task, int64_t rows) {
  for (; task >= parts->tasks; ++parts) task -= parts->tasks;
  const int64_t begin = task * rows;
  return {parts, begin, std::min(rows, parts->out - begin)};
}

constexpr Problem kOneType = "products: weights of one type, and results of theirs";

// What is wrong with the number of weights, or of their products.
inline Problem OfNumber(const Ins& weights, const Outs& results, int64_t most) {
  if (weights.size > most) return "products: at most 8 weights";
  return weights.size == results.size ? nullptr : "products: as many results as weights";
}

// Up to eight weights of one type that meet the same columns, and where their products go.
template <typename Number>
struct SameParts {
  struct Part {
    const Number* weight;
    Number* result;
    int64_t out, tasks;
  };
  std::array<Part, 8> parts;
  int64_t total = 0;  // rows of all

  Problem Read(Type type, const Ins& weights, const Outs& results) {
    if (const Problem problem = OfNumber(weights, results, parts.size())) return problem;
    for (int64_t i = 0; i < weights.size; ++i) {
      const Buffer weight = weights[i], result = results[i];
      if (weight.type != type || result.type != type) return kOneType;
      parts[i] = Part{weight.data<const Number>(), result.data<Number>(), weight.dims[0], 0};
      total += parts[i].out;
    }
    return nullptr;
  }
};

// The same for weights that are all float32, or all bfloat16, and products in float32.
struct FloatParts {
  struct Part {
    const void* weight;
    float* result;
    int64_t out, tasks;
  };
  std::array<Part, 8> parts;
  int64_t rows = 0;   // of all
  bool half = false;  // whether they are bfloat16

  Problem Read(const Ins& weights, const Outs& results) {
    if (const Problem problem = OfNumber(weights, results, parts.size())) return problem;
    for (int64_t i = 0; i < weights.size; ++i) {
      const Buffer weight = weights[i], result = results[i];
      half = weights[0].type == kBF16;
      if (weight.type != (half ? kBF16 : kF32) || result.type != kF32) return kOneType;
      parts[i] = Part{weight.memory, result.data<float>(), weight.dims[0], 0};
      rows += parts[i].out;
    }
    return nullptr;
  }
};

// Rows that a thread reads soon: the first of them, or null, and how many of its inputs are read.
template <typename W>
struct Soon {
  const W* row;
  int64_t inputs;
};

// Which share of the columns meets a block of rows, and which rows come after the block.
//
// Of several shares the first would wait for all of the memory, and the others would leave it idle:
// there each share fetches its part of the rows that come.
struct ColumnShare {
  int64_t index, count;
  bool last;  // whether it is the last block

  // The rows that come, where `row` is the block's first one, of which `deep` inputs are read, and
  // `after` is what comes after the last block.
  template <typename W>
  Soon<W> Coming(const W* row, int64_t stride, int64_t deep, Soon<W> after) const {
    return last ? after : Soon<W>{row + kBlock * stride, deep};
  }
};

// What a thread reads after inputs k ... k + deep - 1 of rows begin ... begin + height - 1 of a
// weight [out, in], at most `most` inputs at a time: the next inputs of the same rows, or else the
// first ones of the next rows, if there are any.
template <typename W>
Soon<W> After(const W* weight, int64_t out, int64_t in, int64_t begin, int64_t height, int64_t k,
              int64_t deep, int64_t most) {
  if (k + deep < in) return {weight + begin * in + k + deep, std::min(most, in - k - deep)};
  return {begin + height < out ? weight + (begin + height) * in : nullptr, std::min(most, in)};
}

// Calls body(row, rows, column, columns, share) for every block of rows, which stays in the caches
// while all columns meet it, and for shares of the columns, as equal as can be, of at most kFew.
template <typename Body>
ALWAYS_INLINE void EachShare(int64_t rows, int64_t columns, const Body& body) {
  const int64_t shares = (columns + kFew - 1) / kFew;
  for (int64_t r = 0; r < rows; r += kBlock) {
    for (int64_t share = 0, m = 0; share < shares; ++share) {
      const int64_t end = columns * (share + 1) / shares;
      const ColumnShare at{share, shares, r + kBlock >= rows};
      body(r, std::min(kBlock, rows - r), m, end - m, at);
      m = end;
    }
  }
}

}  // namespace

#endif  // SPECJAX_TASKS_H_
