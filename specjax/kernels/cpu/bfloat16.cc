// Products, attention and norms of numbers in bfloat16, for CPUs: summed as floats and rounded once.
//
// As in kernels.cc, a column and a node have the same bits, however many others there are.

#include "activation.h"
#include "attention.h"
#include "dots.h"
#include "norm.h"

KERNEL(SpecjaxProductsBfloat16, HalfProducts, "transpose_out")
KERNEL(SpecjaxAttentionBfloat16, (Attention<Half, kBF16>), "tiled")
KERNEL(SpecjaxNormBfloat16, (Norm<Half, kBF16>), "eps", "centered", "plus_one")
KERNEL(SpecjaxSwigluBfloat16, (Swiglu<Half, kBF16>))

// Whether products of bfloat16 are made as such, by tiles or by dot products of pairs.
extern "C" int SpecjaxHasHalfDots() { return ChosenWay() != kWiden; }
