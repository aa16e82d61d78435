// What attention of few and of many columns have in common: the slots that a head of a row reads.

#ifndef SPECJAX_ATTENTION_SLOTS_H_
#define SPECJAX_ATTENTION_SLOTS_H_

#include "vectors.h"

namespace {

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
