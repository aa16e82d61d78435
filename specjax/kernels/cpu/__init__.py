"""CPU kernels in C++: products with a few columns, attention over a cache, norms, argmax,
and the most probable tokens.

XLA multiplies a matrix by 4 to 16 columns at half the speed at which it reads the matrix, because
reading and multiplying take turns; these kernels overlap the two, so that scoring 8 tokens costs
little more than scoring one. XLA's attention copies the part of the cache that it reads; this one
reads the cache in place, exactly as far as it is used. XLA's argmax is a dozen operations; this one
is one call.

Products of bfloat16 with bfloat16 are made by tiles (AMX), where 32 columns cost little more than
one; without them by dot products of pairs (AVX-512 BF16), or from numbers widened to float32, as
all of float16 is (``float16.cc``).

Attention takes queries, and gives results, in the layout of projections, so that nothing is
transposed around it.

Attention of more than eight columns (of prompts, of several drafts under grouped queries) divides
the columns of a head into tiles of up to three vectors, each of which is a task. A tile leaves out
the own entries after the last that one of its nodes sees: half of them in a chunk of a prompt.

A gated layer activates its products within their call (``products.h``), for up to 32 columns, where
a thread has both of them in its own cache.

Products of floats with many columns are made by tiles (AMX) of three bfloat16 numbers for each
float (``amx_floats.h``), with the errors of float32; without tiles, by sums that stay in registers
(``many_columns.h``).

Prompts are read by tiles (AMX) where bfloat16 suffices, and in models with weights of few bits,
whose activations are rounded anyway: attention by ``attention_tiles.h``, and weights of four bits
by ``amx_words.h``. Passes of rounds never are (``kernels/prompts.py``).

Entries of caches are written by one call for all layers: XLA's scatter is a loop over single slots,
and widens a cache of bfloat16 as a whole.

A column of a product or a norm, and a node of attention, has the same bits however many others
there are: greedy text does not depend on the width of a pass. ``SPECJAX_BITS=fixed`` keeps to the
kernels where XLA's products are faster, which is in passes of many columns, and to the same bits
where prompts are read.

A pass waits for memory. Weights lie in large pages (``kernels/pages.py``), each thread takes tasks
that are neighbours in memory, and the next rows are fetched while the present ones are multiplied.
More than eight columns meet a block of rows in shares. Where weights are floats, each share fetches
its part of the next block, so that the first one does not wait for all of it (but not where two
blocks for the processor's own dot products of bfloat16 may be larger than the L2 cache). Packed
columns lie an odd number of cache lines apart. Where four to eight of them would not stay in the L1
cache, all rows of a block meet 512 inputs of them before the next 512. Tiles are loaded before more
is fetched: a load would wait for what was fetched before it.

Weights of eight or four bits become floats in registers (``quantized.cc``), and are read once for
up to eight columns. With AVX-512 VNNI, weights of eight bits with one scale for each output, and
those of four bits, are multiplied as bytes: with few columns by ``byte_dots.h`` and
``nibble_dots.h``, with any number above by ``byte_tiles.h``, or where the processor has tiles of
bytes (AMX) by ``amx_products.h``: from three columns on in eight bits and from 16 on in four. A
column of activations is rounded to 16 bits, which are two bytes, and whole numbers are summed
exactly, so that all of these give the same bits.

``library.py`` finds the compiled libraries: one for activations in float32, and others for weights
in few bits, for bfloat16 and for float16, which are loaded when the first such array comes. A wheel
for x86-64 carries two of each, for processors with AVX2 and with AVX-512, and the fastest that the
processor runs is loaded. Where none runs, and in an installation from source, the system's C++
compiler makes one at first use (a few seconds; it is kept in the user's cache directory), and a
line of the log says so. Without a compiler, XLA's operations serve: slower, otherwise the same.
``SPECJAX_NATIVE`` may be ``auto`` (the default: the kernels are used on a CPU that is JAX's only
device, since XLA cannot split these calls over a mesh), ``always`` or ``never``.

Each thread keeps what it packed last, which ``memory_analysis()`` does not see: 4 bytes, or where
tiles multiply floats or weights are multiplied as bytes 6 (8 where weights of eight and of four
bits meet in one call), times inputs times columns (rounded up to 16 or, where there are more than
32, to 64, and at most 256), and with up to 32 columns up to 4 KB a column more, and with 9 to 32
columns 32 bytes times inputs, for products, twice head size times up to 48 columns for attention,
whose mask may be kept as well, and 8 bytes times head size times the columns of a head for
attention by tiles.
"""

from __future__ import annotations

import functools
import logging
import os

import jax

from . import library

log = logging.getLogger("specjax")


@functools.cache
def chosen(platform: str) -> bool:
    """Whether models on this platform use the kernels; loads, and if need be compiles, them.

    Raises:
      ValueError: ``SPECJAX_NATIVE`` is none of its three values, or ``always`` where the kernels
        cannot be had.
    """
    wish = os.environ.get("SPECJAX_NATIVE", "auto")
    if wish not in ("auto", "always", "never"):
        raise ValueError(f"SPECJAX_NATIVE={wish!r}: it must be auto, always or never")
    on_cpu = platform == "cpu"
    if wish == "never" or wish == "auto" and (not on_cpu or jax.device_count(platform) > 1):
        return False
    problem = library.register() if on_cpu else f"the backend is {platform}"
    if problem and wish == "always":
        raise ValueError(f"SPECJAX_NATIVE=always, but there are no kernels: {problem}")
    if problem:
        log.warning("CPU kernels are not used (decoding will be slower): %s", problem)
    return problem is None
