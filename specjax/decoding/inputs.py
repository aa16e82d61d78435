"""The inputs of a batch, checked before anything is compiled, in the shapes of the loop.

Of what is traced, only shapes and dtypes can be checked; the values are the caller's word.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from .. import sharding
from .._internal import callers
from .._internal.hashable import check_hashable
from .._internal.pytree import pytree_dataclass, static
from ..sampling.distribution import Sampling
from ..types import Drafter, PyTree, Target

# the generator of keys, whatever the default: under vmap the hardware generators draw for all rows
# from the first key, which stands still once its row has finished
KEYS = "threefry2x32"
MOST_TOKENS = 2**31  # lengths are int32


@pytree_dataclass
class DecodeInputs:
    """What a batch asks for, in the shapes of the loop: see ``decode``. Leaves lead with B (the
    key with ``B * num_samples``)."""

    tokens: jax.Array
    lengths: jax.Array
    key: jax.Array
    budget: jax.Array
    sampling: Sampling
    stops: jax.Array
    inputs: PyTree = None
    logprobs: str = static(default="")
    num_samples: int = static(default=1)


def prepare_inputs(
    target: Target,
    drafter: Drafter,
    tokens: jax.typing.ArrayLike,
    lengths: jax.typing.ArrayLike,
    key: jax.Array,
    max_new_tokens: jax.typing.ArrayLike | Sequence[int],
    sampling: Sampling,
    capacity: int | None,
    stops: jax.typing.ArrayLike | Sequence[int],
    inputs: PyTree = None,
    logprobs: bool | str = False,
    num_samples: int = 1,
) -> tuple[DecodeInputs, int]:
    """Checks the arguments of ``decode`` and brings them into the shapes of the loop.

    Args:
      tokens: int32 ``[B, T]``.
      lengths: int32 ``[B]``.
      key: one random key, or keys ``[B * num_samples]``.
      max_new_tokens: int32 ``[]`` or ``[B]``.
      stops: int32 ``[E]`` or ``[B, E]``.
      target, drafter, sampling, ...: as ``decode`` takes them.

    Returns:
      the request, and L, the capacity of the token buffer.

    Raises:
      ValueError, TypeError: naming the argument and the way out.
    """
    check_objects(target, drafter)
    check_static(target, drafter)
    check_even(
        "tokens", tokens, "on the right with any ids, and give the length of each in lengths"
    )
    check_even("stops", stops, "with -1")
    check_sampling(sampling)
    check_capacity(capacity)
    check_mesh(np.shape(tokens)[:1])
    capacity = check_request(target, drafter, tokens, lengths, max_new_tokens, capacity, sampling)
    num_samples = check_samples(num_samples)
    check_key(key, (np.shape(tokens)[0] * num_samples,))
    target.check_inputs(np.shape(tokens)[0], inputs)
    check_stops(stops, np.shape(tokens)[:1])
    ends = stops if np.size(stops) else (-1,)
    ints = tuple(_host(x) for x in (tokens, lengths, max_new_tokens, ends))
    request = DecodeInputs(
        **_rows(num_samples, ints, key),
        sampling=sampling.rows(np.shape(tokens)[0]),
        inputs=inputs,
        logprobs=check_logprobs(logprobs),
        num_samples=num_samples,
    )
    return request, capacity


def _host(x) -> jax.typing.ArrayLike:
    """Numbers as an array, which stays where it is."""
    return x if isinstance(x, jax.Array) else np.asarray(x, np.int32)


@functools.partial(jax.jit, static_argnums=0)  # one program, not a dozen operations
def _rows(num_samples, ints, key):
    """Tokens, lengths, budget and stops in int32, and the key of each sample."""
    tokens, lengths, budget, stops = (x.astype(jnp.int32) for x in ints)
    batch = len(tokens)
    key = jax.random.wrap_key_data(jax.random.key_data(key)[..., :2], impl=KEYS)
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(batch * num_samples))
    stops = jnp.broadcast_to(stops, (batch, stops.shape[-1]))
    return {
        "tokens": tokens,
        "lengths": lengths,
        "key": key,
        "budget": jnp.broadcast_to(budget, (batch,)),
        "stops": stops,
    }


def _concrete(x) -> np.ndarray | None:
    if isinstance(x, Tracer):
        return None
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return None  # other processes hold a part of it
    return np.asarray(x)


_LOADED = {
    "target": "specjax.load returns an LM: give lm.target, with lm.params as params['target'], or "
    "call specjax.generate(lm, ...)",
    "drafter": "specjax.load_drafter returns a HeadLM: give heads.drafter (above temperature 0 "
    "with sibling_sampling='iid', which draws its tokens), with heads.params as "
    "params['drafter']; specjax.generate takes it whole, and names of drafters",
}


def check_objects(target, drafter) -> None:
    """Raises ``TypeError`` for what is no ``Target`` or no ``Drafter``."""
    for name, value, base in (("target", target, Target), ("drafter", drafter, Drafter)):
        if isinstance(value, type) and issubclass(value, base):
            raise TypeError(f"{name}={value.__name__} is a class: give an instance of it")
        if name == "drafter" and isinstance(value, str):
            raise TypeError(
                f"drafter={value!r} is a name, which specjax.generate takes: give an object here, "
                "such as specjax.drafters.NGram()"
            )
        if not isinstance(value, base):
            raise TypeError(
                f"{name} has the type {type(value).__name__}, which is no subclass of specjax."
                f"{base.__name__}: derive it from that base class, which documents every hook; "
                f"{_LOADED[name]}"
            )


def check_static(target: Target, drafter: Drafter) -> None:
    """Raises ``TypeError`` for objects that cannot be static arguments of a compiled program, and
    for a drafter that does not state how many tokens it drafts."""
    check_hashable("target", target)
    check_hashable("drafter", drafter)
    number = getattr(drafter, "num_draft", None)
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
        raise TypeError(
            f"drafter: {type(drafter).__name__}.num_draft is {number!r}: state how many tokens are "
            "drafted in a round, an integer of at least 0, such as the field num_draft: int = 3"
        )


def warn_capacity(lengths, max_new_tokens, capacity: int | None, target: Target) -> None:
    """Warns where a buffer of one's own ends rows before ``max_new_tokens``."""
    sizes, budget = _concrete(lengths), _concrete(max_new_tokens)
    if capacity is None or sizes is None or budget is None or capacity == target.max_positions:
        return
    longest = int(np.max(sizes + budget))
    if longest > capacity:
        warnings.warn(
            f"capacity={capacity} holds prompt and new tokens: rows that reach it end there, "
            f"before max_new_tokens; give at least {longest} to generate all of them",
            stacklevel=callers.outside(),
        )


def check_even(name: str, rows, way: str) -> None:
    """Raises ``ValueError`` for lists of different lengths, which are no array; ``way`` says how to
    pad them."""
    try:
        np.shape(rows)
    except ValueError:
        raise ValueError(
            f"{name}: its rows differ in length: give rows of one length, padded {way}"
        ) from None


def check_sampling(sampling) -> None:
    """Raises ``TypeError`` for what is no ``Sampling``."""
    if not isinstance(sampling, Sampling):
        raise TypeError(
            f"sampling={sampling!r:.60}: give specjax.Sampling(...), such as "
            "specjax.Sampling(temperature=0.8), or leave it out"
        )


def check_capacity(capacity) -> None:
    """Raises ``ValueError`` for what is no number of slots, or is traced."""
    if isinstance(capacity, Tracer):
        raise ValueError(
            "capacity is traced: it is the size of a buffer, so give a Python integer (under "
            "jax.jit one of static_argnames)"
        )
    if capacity is None:
        return
    try:
        fits = operator.index(capacity) > 0 and not isinstance(capacity, bool)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"capacity={capacity!r}: it must be an integer, at least 1")


def check_mesh(batch: tuple[int, ...]) -> None:
    """Raises ``ValueError`` in a mesh of other axes than the loop's, or one that splits no batch
    of this size. Within ``shard_map`` or ``pmap`` each device has rows of its own, and any axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_types and all(kind == AxisType.Manual for kind in mesh.axis_types):
        return
    sharding.check_axes(mesh)
    if batch:
        sharding.check_rows(batch[0], dict(mesh.shape).get(sharding.DATA, 1))


def check_key(key, batch: tuple[int, ...]) -> None:
    """Raises ``ValueError`` for what is no random key, or not one for each row."""
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise ValueError(
            f"key has type {getattr(key, 'dtype', type(key).__name__)}: give jax.random.key(seed), "
            "or a batch of such keys, one a row (wrap raw ones with jax.random.wrap_key_data)"
        )
    if key.shape not in ((), batch):
        raise ValueError(f"key has shape {key.shape}: give one key, or keys of shape {batch}")


def check_samples(num_samples) -> int:
    """Raises ``ValueError`` for what is no number of samples."""
    if not isinstance(num_samples, int | np.integer) or num_samples < 1:
        raise ValueError(f"num_samples={num_samples!r}: it must be an integer, at least 1")
    return int(num_samples)


def check_logprobs(which) -> str:
    """The name of what is asked for, empty for nothing. Raises ``ValueError`` for other names."""
    known = {False: "", None: "", True: "raw", "raw": "raw", "law": "law"}
    if not isinstance(which, bool | str | None) or which not in known:
        raise ValueError(
            f"logprobs={which!r}: give True or 'raw' (of the model), 'law' (of what is drawn "
            "from), or False"
        )
    return known[which]


def check_stops(stops, batch: tuple[int, ...], name: str = "stops") -> None:
    """Raises ``ValueError`` unless stops are integers ``[E]`` or ``[B, E]``; it calls them
    ``name``."""
    shape = np.shape(stops)
    if len(shape) not in (1, 2) or shape[:-1] not in ((), (1,), batch):
        raise ValueError(
            f"{name} has shape {shape}: give a list of ids, or one of equal length for each of "
            f"{batch} rows, padded with -1"
        )
    if np.size(stops):
        check_integers(name, stops, "token ids")
        values = _concrete(stops)
        if values is not None and not -MOST_TOKENS <= values.min() <= values.max() < MOST_TOKENS:
            raise ValueError(f"{name}: ids from {values.min()} to {values.max()} are no token ids")


def check_integers(name: str, values, what: str) -> None:
    """Raises ``ValueError`` unless ``values``, which may be traced, have an integer dtype."""
    dtype = values.dtype if hasattr(values, "dtype") else np.asarray(values).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {dtype}: {what} are integers")


def check_request(target, drafter, tokens, lengths, max_new_tokens, capacity, sampling) -> int:
    """Raises ``ValueError`` for what cannot be decoded; returns the capacity of the buffer."""
    if np.ndim(tokens) != 2:
        raise ValueError(
            f"tokens has shape {np.shape(tokens)}: it must be [batch, tokens]; "
            "for one prompt give tokens[None]"
        )
    batch, width = np.shape(tokens)
    if batch == 0:
        raise ValueError("tokens: the batch is empty; give at least one prompt")
    if np.shape(lengths) != (batch,):
        raise ValueError(
            f"lengths has shape {np.shape(lengths)}, tokens has {batch} rows: give one length a row"
        )
    longest = width
    sizes = _concrete(lengths)
    if width == 0 or (sizes is not None and sizes.min() < 1):
        raise ValueError("lengths: an empty prompt; every row needs at least one token (e.g. BOS)")
    check_integers("tokens", tokens, "token ids")
    check_integers("lengths", lengths, "lengths")
    if sizes is not None:
        longest = int(sizes.max())
        if longest > width:
            raise ValueError(f"lengths: {longest} tokens in a row of {width}")
    budget = _concrete(max_new_tokens)
    if budget is None:
        check_integers("max_new_tokens", max_new_tokens, "numbers of tokens")
    elif not np.issubdtype(budget.dtype, np.integer):
        raise ValueError(f"max_new_tokens={budget.tolist()!r} must be an integer")
    if budget is not None and budget.size and np.max(budget) >= MOST_TOKENS:
        raise ValueError(f"max_new_tokens={budget}: it must be below 2**31")
    if budget is not None and (budget.size == 0 or budget.min() < 1):
        raise ValueError(f"max_new_tokens={budget} must be at least 1")
    if np.shape(max_new_tokens) not in ((), (batch,)):
        raise ValueError(
            f"max_new_tokens has shape {np.shape(max_new_tokens)}: give an int or one value for "
            f"each of {batch} rows"
        )
    context = target.max_positions
    if context is not None and longest > context:
        raise ValueError(
            f"lengths: a prompt of {longest} tokens exceeds the target's context of {context}; "
            "shorten the prompt"
        )
    if capacity is None:
        if budget is None:
            raise ValueError(
                "capacity: it must be given where max_new_tokens is traced, since it is the size "
                "of a buffer"
            )
        # by the prompts' width, not their lengths: another batch of this shape compiles nothing
        capacity = width + int(budget.max())
        most, size = np.broadcast_arrays(budget, longest if sizes is None else sizes)
        row = np.argmax(most + size)
        most, size = int(most.flat[row]), int(size.flat[row])
        if context is not None and size + most > context:
            raise ValueError(
                f"max_new_tokens={most} after a prompt of {size} tokens exceeds the target's "
                f"context of {context}; ask for at most {context - size}, or give "
                f"capacity={context} to stop there"
            )
        capacity = capacity if context is None else min(capacity, context)
        if capacity >= MOST_TOKENS:
            raise ValueError(
                f"max_new_tokens={budget}: prompts of {width} tokens and these new ones need a "
                "buffer of 2**31 tokens or more: give fewer, or a capacity at which rows end"
            )
    elif longest > capacity:
        raise ValueError(
            f"capacity={capacity}: a prompt of {longest} tokens does not fit; give at least "
            f"{longest}, plus what is to be generated"
        )
    elif context is not None and capacity > context:
        raise ValueError(f"capacity={capacity} exceeds the target's context of {context}")
    values = _concrete(tokens)
    if values is not None:
        if sizes is not None:
            values = values[np.arange(width) < sizes[:, None]]
        if values.min() < 0 or values.max() >= target.vocab_size:
            raise ValueError(
                f"tokens: ids from {values.min()} to {values.max()}, the target's vocabulary has "
                f"{target.vocab_size}: was another tokenizer used?"
            )
    size = drafter.vocab_size
    if size is not None and size != target.vocab_size:
        raise ValueError(
            f"drafter: its vocabulary has {size} tokens, the target's {target.vocab_size}; they "
            "must share one (see specjax.load for checking tokenizers)"
        )
    sampling.check()
    bias = sampling.logit_bias
    if isinstance(bias, Mapping):
        raise ValueError(
            "logit_bias is a mapping, which specjax.generate takes: give an array of shape "
            f"[{target.vocab_size}] here, or one for each row"
        )
    if bias is not None and np.shape(bias)[-1:] != (target.vocab_size,):
        raise ValueError(
            f"logit_bias has {(np.shape(bias) or (0,))[-1]} entries, the target's vocabulary "
            f"{target.vocab_size}"
        )
    return int(capacity)
