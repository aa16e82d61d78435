// Small operations that would each be a loop of XLA's over single numbers: rows of a table, copies.

#ifndef SPECJAX_SMALL_H_
#define SPECJAX_SMALL_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "bfloat16.h"
#include "call.h"
#include "vectors.h"

namespace {

// table [rows, size], float32 or bfloat16, index [n] -> its rows as columns, float32 [size, n]. An
// index below zero counts from the end; one beyond the table is that of the nearest row.
Problem Columns(ThreadPool, In<> table, In<kS32> index, Out<kF32> out) {
  const int64_t rows = table.dims[0], size = table.dims[1];
  const int64_t count = index.count();
  float* to = out.data<float>();
  const auto put = [=](const auto* from, int64_t m) {
    for (int64_t i = 0; i < size; ++i) to[i * count + m] = Number(from[i]);
  };
  for (int64_t m = 0; m < count; ++m) {
    int64_t row = index.data<int32_t>()[m];
    row = std::clamp<int64_t>(row < 0 ? row + rows : row, 0, rows - 1);
    if (table.type == kBF16) {
      put(table.data<const Half>() + row * size, m);
    } else if (count == 1) {
      std::memcpy(to, table.data<const float>() + row * size, size * sizeof(float));
    } else {
      put(table.data<const float>() + row * size, m);
    }
  }
  return nullptr;
}

// Caches [B, K, S, E] and as many entries [B, K, N, E], of any types -> the caches, in the same memory
// where that may be, in whose slots where[b, t] are the entries of nodes path[b, t]; what is to be in
// no slot has S there.
Problem Write(ThreadPool, In<kS32> path, In<kS32> where, Ins arrays, Outs results) {
  const int64_t batch = path.dims[0], steps = path.dims[1];
  const int64_t count = results.size;
  if (arrays.size != 2 * count) return "write: as many entries as caches";
  for (int64_t i = 0; i < count; ++i) {
    const Buffer cache = arrays[i], entries = arrays[count + i], result = results[i];
    const int64_t* dims = cache.dims;
    const int64_t heads = dims[1], slots = dims[2], nodes = entries.dims[2];
    const int64_t bytes = dims[3] * cache.width();
    const char* from = entries.data<const char>();
    char* to = result.data<char>();
    if (to != cache.memory) std::memcpy(to, cache.memory, cache.bytes());
    for (int64_t row = 0; row < batch * heads; ++row) {
      const int64_t first = row / heads * steps;
      for (int64_t t = first; t < first + steps; ++t) {
        const int64_t slot = where.data<int32_t>()[t], node = path.data<int32_t>()[t];
        if (slot < 0 || slot >= slots || node < 0 || node >= nodes) continue;
        std::memcpy(to + (row * slots + slot) * bytes, from + (row * nodes + node) * bytes, bytes);
      }
    }
  }
  return nullptr;
}

// x -> x, in the same memory where that may be.
Problem Copy(ThreadPool, In<> x, Out<> out) {
  if (x.memory != out.memory) std::memcpy(out.memory, x.memory, x.bytes());
  return nullptr;
}

}  // namespace

#endif  // SPECJAX_SMALL_H_
