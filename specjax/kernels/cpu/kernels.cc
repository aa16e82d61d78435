// Products of a weight matrix with columns, norms, argmax, the most probable tokens and small
// operations, for CPUs. The other half of this library is attention.cc: both are compiled at the same time.
//
// Every function is deterministic: which thread computes a row does not change it.

#include "activation.h"
#include "amx.h"
#include "argmax.h"
#include "likeliest.h"
#include "many_columns.h"
#include "norm.h"
#include "products.h"
#include "small.h"

KERNEL(SpecjaxArgmax, Argmax)
KERNEL(SpecjaxColumns, Columns)
KERNEL(SpecjaxCopy, Copy)
KERNEL(SpecjaxLikeliest, LikeliestTokens)
KERNEL(SpecjaxManyProducts, ManyProducts, "transpose_out")
KERNEL(SpecjaxNorm, (Norm<float, kF32>), "eps", "centered", "plus_one")
KERNEL(SpecjaxProducts, Products, "transpose_out")
KERNEL(SpecjaxSwiglu, (Swiglu<float, kF32>))
KERNEL(SpecjaxSwigluProducts, SwigluProducts)
KERNEL(SpecjaxWrite, Write)

// Whether the processor, and the compiler, have tiles of bfloat16.
extern "C" int SpecjaxHasTiles() {
#if defined(SPECJAX_TILES)
  return HasTilesOf(kHalfTiles);
#else
  return 0;
#endif
}
