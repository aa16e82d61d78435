// Products of a weight matrix with columns, norms, argmax and small operations, for CPUs. The other
// half of this library is attention.cc: both are compiled at the same time.
//
// Every function is deterministic: which thread computes a row does not change it.

#include "activation.h"
#include "amx.h"
#include "argmax.h"
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxNorm, (Norm<float, ffi::F32>), BindNorm<ffi::F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxSwiglu, (Swiglu<float, ffi::F32>), BindSwiglu<ffi::F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxWrite, Write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

// Whether the processor, and the compiler, have tiles of bfloat16.
extern "C" int SpecjaxHasTiles() {
#if defined(SPECJAX_TILES)
  return HasTilesOf(kHalfTiles);
#else
  return 0;
#endif
}
