// Products, attention and norms of numbers in bfloat16, for CPUs: summed as floats and rounded once.
//
// As in kernels.cc, a column and a node have the same bits, however many others there are.

#include "activation.h"
#include "attention.h"
#include "dots.h"
#include "norm.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxProductsBfloat16, HalfProducts, BindProducts<ffi::BF16>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxAttentionBfloat16, (Attention<Half, ffi::BF16>),
                              BindAttention<ffi::BF16>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxNormBfloat16, (Norm<Half, ffi::BF16>), BindNorm<ffi::BF16>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxSwigluBfloat16, (Swiglu<Half, ffi::BF16>),
                              BindSwiglu<ffi::BF16>());

// Whether products of bfloat16 are made as such, by tiles or by dot products of pairs.
extern "C" int SpecjaxHasHalfDots() { return ChosenWay() != kWiden; }
