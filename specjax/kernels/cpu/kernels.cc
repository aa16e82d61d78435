// Products of a weight matrix with columns, attention over a cache, norms, argmax and small
// operations, for CPUs.
//
// Every function is deterministic: which thread computes a row does not change it.
//
// One translation unit, so that the library is compiled in one call of the compiler.

#include "activation.h"
#include "argmax.h"
#include "attention.h"
#include "dots.h"
#include "many_columns.h"
#include "norm.h"
#include "products.h"
#include "small.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxArgmax, Argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxColumns, Columns,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxCopy, Copy,
                              ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxProducts, Products, BindProducts());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxManyProducts, ManyProducts, BindProducts());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxProductsBfloat16, HalfProducts, BindProducts<ffi::BF16>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxAttention, (Attention<float, ffi::F32>),
                              BindAttention<ffi::F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxAttentionBfloat16, (Attention<Half, ffi::BF16>),
                              BindAttention<ffi::BF16>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxNorm, (Norm<float, ffi::F32>), BindNorm<ffi::F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxNormBfloat16, (Norm<Half, ffi::BF16>), BindNorm<ffi::BF16>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxSwiglu, (Swiglu<float, ffi::F32>), BindSwiglu<ffi::F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxSwigluBfloat16, (Swiglu<Half, ffi::BF16>),
                              BindSwiglu<ffi::BF16>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxWrite, Write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

// Whether products of bfloat16 are made by tiles.
extern "C" int SpecjaxHasTiles() { return ChosenWay() == kTiles; }

// Whether products of bfloat16 are made as such, by tiles or by dot products of pairs.
extern "C" int SpecjaxHasHalfDots() { return ChosenWay() != kWiden; }
