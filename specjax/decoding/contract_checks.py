"""Checks of what targets, drafters and rules return: shapes, dtypes and structures.

All of them run while a program is traced, so they cost nothing when it runs. Each error names the
hook, what it returned and what was expected.
"""

from __future__ import annotations

import contextlib
import operator
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from ..types import (
    DRAWS,
    Draft,
    Drafter,
    HeadTarget,
    PyTree,
    Rule,
    Scores,
    SubNetwork,
    Target,
    Verdict,
)


class MissingWeightsError(ValueError):
    """A drafter failed, and it was given no weights."""


def check_array(what: str, x, shape: tuple[int | None, ...], dtype, hint: str = "") -> None:
    """Raises ``ValueError`` unless ``x`` has this shape (None: any size) and dtype."""
    import chex  # here, since it would be a part of the time that importing the package takes

    name = "a floating dtype" if dtype is jnp.floating else jnp.dtype(dtype).name
    try:
        chex.assert_shape(x, shape)
        if dtype is jnp.floating:
            chex.assert_type(x, float)
        elif x.dtype != dtype:
            raise AssertionError
    except (AssertionError, AttributeError, TypeError, ValueError):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{what} is {_described(x)}: expected {name} of shape [{expected}]{hint}"
        ) from None


def check_keys(key, batch: int) -> None:
    """Raises ``ValueError`` unless ``key`` holds a random key, typed or raw, for each row."""
    shape = jnp.shape(key)
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if shape[:1] != (batch,) or len(shape) != (1 if typed else 2):
        raise ValueError(
            f"accept: key is {_described(key)}: give random keys [{batch}], one for each row, as "
            "specjax.acceptance_keys(state) makes them"
        )


def check_leads(what: str, tree: PyTree, batch: int) -> None:
    """Raises ``ValueError`` unless every leaf of ``tree`` leads with the batch."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.shape(leaf)[:1] != (batch,):
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} is {_described(leaf)}: every leaf must lead "
                f"with the batch, {batch} rows"
            )


def check_same(what: str, new: PyTree, old: PyTree) -> None:
    """Raises ``ValueError`` unless two trees have the same structure, shapes and dtypes."""
    import chex

    try:
        chex.assert_trees_all_equal_structs(new, old)
    except (AssertionError, ValueError, TypeError):
        raise ValueError(
            f"{what} has the structure {jax.tree.structure(new)}: expected that of before, "
            f"{jax.tree.structure(old)}"
        ) from None
    flat = jax.tree_util.tree_flatten_with_path(new)[0]
    for (path, leaf), before in zip(flat, jax.tree.leaves(old), strict=True):
        if (jnp.shape(leaf), jnp.result_type(leaf)) != (jnp.shape(before), jnp.result_type(before)):
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} is {_described(leaf)}: expected what it was "
                f"before, {_described(before)}"
            )


def check_draft(drafter: Drafter, made, batch: int) -> None:
    """Raises ``ValueError`` for what ``draft_step`` must not return."""
    hook = f"{type(drafter).__name__}.draft_step"
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], Draft):
        raise ValueError(
            f"{hook} returned {_described(made)}: expected (draft, state), the draft made with "
            "trees.chain_draft or trees.tree_draft"
        )
    draft = made[0]
    nodes, tokens = drafter.num_draft + 1, jnp.shape(draft.tokens)
    hint = f" (the root and num_draft={drafter.num_draft} tokens)"
    check_array(f"{hook}: draft.tokens", draft.tokens, (batch, nodes), jnp.int32, hint)
    check_array(f"{hook}: draft.start", draft.start, (batch,), jnp.int32)
    for name, value, dtype in (
        ("parent", draft.parent, jnp.int32),
        ("scored", draft.scored, jnp.bool_),
        ("candidate", draft.candidate, jnp.bool_),
        ("law", draft.law, jnp.int32),
    ):
        if value is not None:
            check_array(f"{hook}: draft.{name}", value, tokens, dtype)
    if (draft.topology is None) == (draft.parent is None) or (
        draft.topology is not None and len(draft.topology) != nodes
    ):
        raise ValueError(
            f"{hook}: draft.topology={draft.topology} and draft.parent="
            f"{_described(draft.parent)}: give one of them, for {nodes} nodes"
        )
    if draft.draws not in DRAWS:
        raise ValueError(f"{hook}: draft.draws={draft.draws!r}: expected one of {DRAWS}")
    if (draft.law is None) != (draft.laws is None):
        raise ValueError(
            f"{hook}: draft.law is {_described(draft.law)}, draft.laws is "
            f"{_described(draft.laws)}: give both, or neither"
        )
    if draft.laws is not None:
        width = None if draft.vocab is None else jnp.shape(draft.vocab)[-1]
        check_array(f"{hook}: draft.laws", draft.laws, (batch, None, width), jnp.float32)
    if draft.vocab is not None:
        check_array(f"{hook}: draft.vocab", draft.vocab, (batch, None), jnp.int32)
    if trees.max_depth(draft) > drafter.depth:
        raise ValueError(
            f"{hook}: the draft is {trees.max_depth(draft)} deep, and {type(drafter).__name__}."
            f"depth is {drafter.depth}: state the depth of the deepest node"
        )


def verified(target: Target, params, cache, draft: Draft, **settings) -> Scores:
    """What ``target.verify`` returns of ``draft``, checked.

    Args:
      settings: the keyword arguments of ``Target.verify``.

    Raises:
      ValueError: the scores are none that ``verify`` may return.
    """
    scores = target.verify(params, cache, draft, **settings)
    check_scores(target, scores, draft, target.vocab_size, **settings)
    return scores


def verified_by_part(
    part: SubNetwork, target: Target, params, cache, draft: Draft, **settings
) -> Scores:
    """What ``part.verify`` returns of ``draft``, checked; ``part``: a sub-network of ``target``.

    Args:
      settings: the keyword arguments of ``SubNetwork.verify``.

    Raises:
      ValueError: the scores are none that ``verify`` may return.
    """
    scores = part.verify(params, cache, draft, **settings)
    check_scores(part, scores, draft, target.vocab_size, **settings)
    return scores


def committed(target: Target, cache, entries, start, verdict: Verdict):
    """The cache that ``target.commit`` returns, checked. Warns if it is the one that was given.

    Raises:
      ValueError: it has another structure, shape or dtype than before.
    """
    kept = target.commit(cache, entries, start, verdict)
    hook = f"{type(target).__name__}.commit"
    check_same(f"{hook}: the cache", kept, cache)
    old, new, made = (jax.tree.leaves(x) for x in (cache, kept, entries))
    # a target that remembers nothing returns the cache itself as its entries
    if (
        old
        and made
        and all(map(operator.is_, new, old))
        and not any(x is y for x in made for y in old)
    ):
        warnings.warn(
            f"{hook} returned the cache that it was given, so nothing of the text is remembered: "
            "write the entries into it, as specjax.kv_cache.commit does; specjax.check_target "
            "tests a target. A target that needs no memory returns entries=cache from verify",
            stacklevel=2,
        )
    return kept


def check_scores(
    model: Target | SubNetwork,
    scores,
    draft: Draft,
    vocab_size: int,
    *,
    features: tuple[int, ...] = (),
    since: int = 0,
    entries: PyTree = None,
    logits: bool | jax.Array = True,
) -> None:
    """Raises ``ValueError`` for what ``verify`` must not return, called with these arguments."""
    hook = f"{type(model).__name__}.verify"
    batch, nodes = draft.tokens.shape[0], draft.tokens.shape[1] - since
    if not isinstance(scores, Scores):
        raise ValueError(f"{hook} returned {_described(scores)}: expected specjax.Scores")
    if not isinstance(logits, bool):
        hint = " (batch, the one node that was asked for, vocabulary)"
        check_array(f"{hook}: logits", scores.logits, (batch, 1, vocab_size), jnp.float32, hint)
    elif logits:
        shape = (batch, nodes, vocab_size)
        later = f"nodes {since}:" if since else "nodes"
        hint = f" (batch, {later} of the draft, vocabulary)"
        check_array(f"{hook}: logits", scores.logits, shape, jnp.float32, hint)
    if features:
        hint = f" (of the hidden states {features}, side by side)"
        size = model.hidden_size if isinstance(model, HeadTarget) else None
        shape = (batch, nodes, None if size is None else size * len(features))
        check_array(f"{hook}: features", scores.features, shape, jnp.floating, hint)
    check_leads(f"{hook}: entries", scores.entries, batch)


def check_head_target(target: HeadTarget, params, batch: int) -> None:
    """Raises ``ValueError`` for what the hooks that heads call must not return.

    Args:
      params: the target's weights. The hooks are traced, and nothing is computed.
      batch: B, the number of rows with which the hooks are traced.
    """
    kind, nodes = type(target).__name__, 2
    tokens = jax.ShapeDtypeStruct((batch, nodes), jnp.int32)
    columns = jax.eval_shape(target.embed, params, tokens)
    size = target.hidden_size
    hint = " (hidden_size, batch * nodes)"
    check_array(f"{kind}.embed", columns, (size, batch * nodes), jnp.floating, hint)
    hidden = jax.ShapeDtypeStruct(columns.shape, target.activation_dtype(params))
    logits = jax.eval_shape(lambda params, x: target.head(params, x, batch), params, hidden)
    shape = (batch, nodes, target.vocab_size)
    check_array(f"{kind}.head", logits, shape, jnp.float32, " (batch, nodes, vocabulary)")
    try:
        table = jax.eval_shape(target.head_table, params)
    except NotImplementedError:  # few drafters and recipes read it
        return
    shape = (target.vocab_size, columns.shape[0])
    if jnp.shape(table) != shape:
        raise ValueError(
            f"{kind}.head_table is {_described(table)}: expected an array of shape {[*shape]} "
            "(vocabulary, hidden_size)"
        )


def check_readout(drafter: Drafter, readout, batch: int) -> None:
    """Raises ``ValueError`` for what ``readout`` must not return."""
    hook = f"{type(drafter).__name__}.readout"
    check_leads(hook, readout, batch)
    if not drafter.reads_nodes and jax.tree.leaves(readout):
        raise ValueError(
            f"{hook} returned {_described(readout)}, and reads_nodes is False: a drafter whose "
            "observe reads all nodes of a round states reads_nodes = True"
        )


def rests(drafter: Drafter, plan) -> jax.Array:
    """What ``drafter.rests`` says of a plan, checked.

    Raises:
      ValueError: it is no bool scalar.
    """
    resting = drafter.rests(plan)
    check_array(f"{type(drafter).__name__}.rests", jnp.asarray(resting), (), jnp.bool_)
    return resting


def check_evidence(rule: Rule, evidence, draft: Draft) -> None:
    """Raises ``ValueError`` for what ``evidence`` must not return."""
    hook = f"{type(rule).__name__}.evidence"
    if not isinstance(evidence, dict):
        raise ValueError(f"{hook} returned {_described(evidence)}: expected a dict of arrays")
    for name, values in evidence.items():
        shape = draft.tokens.shape
        check_array(f"{hook}: {name}", values, shape, jnp.float32, " (batch, nodes)")


def check_verdict(rule, verdict, draft: Draft) -> None:
    """Raises ``ValueError`` for what a rule must not return."""
    hook, batch = f"{type(rule).__name__}.__call__", draft.tokens.shape[0]
    if not isinstance(verdict, Verdict):
        raise ValueError(f"{hook} returned {_described(verdict)}: expected specjax.Verdict")
    depth = trees.max_depth(draft)
    hint = f" (batch, the draft's depth of {depth} and one)"
    check_array(f"{hook}: path", verdict.path, (batch, depth + 1), jnp.int32, hint)
    check_array(f"{hook}: count", verdict.count, (batch,), jnp.int32)
    check_array(f"{hook}: token", verdict.token, (batch,), jnp.int32)


def check_params(params) -> None:
    """Raises ``ValueError`` unless ``params`` are those of ``decode``."""
    try:
        found = "target" in params
    except TypeError:
        found = False
    if not found:
        given = sorted(map(str, params)) if isinstance(params, dict) else type(params).__name__
        raise ValueError(
            f"params is {given}: give a dict with 'target', the weights of the target, and "
            "'drafter', those of the drafter (None where it has none)"
        )


@contextlib.contextmanager
def missing_target_params(params, target: Target):
    """Names ``params["target"]`` in what a target raises where it is None.

    Raises:
      ValueError: the target failed as code does that reads a field or an entry of None.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        if params["target"] is not None:
            raise
        raise ValueError(
            f"params['target'] is None, and the target {type(target).__name__} fails without it "
            f"({type(error).__name__}: {error}): give params={{'target': its weights, ...}}"
        ) from error


@contextlib.contextmanager
def missing_params(params, drafter: Drafter):
    """Names ``params["drafter"]`` in what a drafter raises where it is None.

    Raises:
      MissingWeightsError: the drafter failed as code does that reads a field or an entry of None.
    """
    try:
        yield
    except Exception as error:
        if params.get("drafter") is not None:
            raise
        if not isinstance(error, AttributeError | KeyError | TypeError):
            error.add_note(
                f"params['drafter'] is None: if the drafter {drafter.name!r} has weights, give "
                "params={'target': ..., 'drafter': its weights}"
            )
            raise
        raise MissingWeightsError(
            f"params['drafter'] is missing, and the drafter {drafter.name!r} fails without it "
            f"({type(error).__name__}: {error}): give params={{'target': ..., 'drafter': its "
            "weights}"
        ) from error


def _described(x) -> str:
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return f"{x.dtype.name} of shape [{', '.join(map(str, x.shape))}]"
    if isinstance(x, tuple | list):
        parts = ", ".join(map(_described, x[:3])) + ", ..." * (len(x) > 3)
        return f"a {type(x).__name__} of {len(x)} ({parts})"
    return "None" if x is None else f"a {type(x).__name__}"
