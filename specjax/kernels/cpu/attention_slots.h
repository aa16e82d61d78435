// The slots of a cache that a row has used, and its own entries.

#ifndef SPECJAX_ATTENTION_SLOTS_H_
#define SPECJAX_ATTENTION_SLOTS_H_

#include "bfloat16.h"
#include "vectors.h"

namespace {

constexpr int kSlots = 128;  // cache slots scored at a time: their keys stay in the L1 cache
constexpr float kLog2E = 1.44269504088896341f;

// `used` slots of the cache of one head of one row, then its own entries.
template <typename T>
struct Slots {
  const T *keys, *values;
  int64_t count;
  const bool* mask;
};
template <typename T>
using Both = std::array<Slots<T>, 2>;

}  // namespace

#endif  // SPECJAX_ATTENTION_SLOTS_H_
