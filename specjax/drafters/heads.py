"""Heads: small networks that read hidden states of the target and propose a tree of tokens.

``HeadDrafter`` is the base class of all of them. A method with weights needs three things: a
configuration (a frozen dataclass), a module made from it (``flax.nnx``), and a subclass of
``HeadDrafter`` that says how the module gives logits, depth after depth. The smallest one::

    @dataclasses.dataclass(frozen=True)
    class MyHeads(HeadDrafter):
        module = MyModule                       # MyModule(config, rngs=...)
        name = "my-heads"

        def make_level(self, params, target_params, state, context):
            heads = self.heads(params)          # the module with its weights
            return independent_level(lambda: heads.logits(state.feature))  # [B, K, V]

A head whose ``observe`` is that of ``HeadDrafter`` reads one hidden state a round, that before the
root; with ``reads_last = True`` long prompts are then read faster.

``registry.py`` makes it known to the rest of the project. Arrays inside of heads are feature-major,
``[size, M]`` over M columns (a row of the batch and a node each), as are those of the models.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from .. import trees
from .._internal import callers
from .._internal.keywords import counted
from .._internal.optional import required, unset
from .._internal.pytree import pytree_dataclass
from ..models.config import DecoderConfig
from ..trees import expand
from ..trees.levels import Words, depth_of
from ..types import Draft, HeadTarget, PyTree
from .base import ChainDrafter

Level = Callable[[Any, Draft, int], tuple[jax.Array, Any]]  # see `trees.expand`


@pytree_dataclass
class HeadState:
    """The state of a head between rounds.

    Attributes:
      feature: ``[B, F]``, the hidden state whose logits produced the root, which is that of the
        token before the root. Zeros if there is none (a prompt of one token).
    """

    feature: jax.Array


class VocabMap(nnx.Variable):
    """int32 ``[Vd]``, the target's id of each token of a draft vocabulary; it is not trained."""


@functools.cache
def _abstract(module, config) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))


@dataclasses.dataclass(frozen=True)
class HeadDrafter(ChainDrafter, abc.ABC):
    """The base class of drafters that read hidden states of the target.

    A subclass must set ``module`` and ``name`` and implement ``make_level``. It may override:

    - ``max_depth`` and ``default_topology``, if they do not follow from ``config.num_heads``;
    - ``greatest_number``, if ``num="auto"`` may ask for more tokens than the topology has;
    - ``features``, ``init`` and ``observe``, if it keeps more than one hidden state;
    - ``words``, if it predicts a part of the target's vocabulary alone;
    - ``sync``, if it lags behind what was committed (see ``Drafter``).

    ``num_draft`` and ``depth`` follow from the topology.

    Attributes:
      config: the shape of the heads, with ``hidden_size``, ``vocab_size`` and ``num_heads``.
      target: the target whose hidden states are read; heads may share its embeddings and LM head.
      topology: the tree to draft (see ``trees.topology``), no deeper than ``max_depth``; None:
        ``default_topology``.
      layer: which hidden state of the target is read, counted as ``hidden_states[layer]`` of
        Hugging Face; None: the last one, normed.
      sibling_sampling: how children of a node are picked: ``top``, ``iid``, ``distinct`` or
        ``hub``, see ``trees.expand``.
      trained_depth: how many tokens after the root the heads were trained to draft, where their
        file says so and they can draft more; ``with_topology`` warns of deeper trees.
      module: the class of the weights, an ``nnx.Module`` made by ``module(config, rngs=...)``.
      stored_settings: fields that are kept in files of any layout, where they are not the usual
        ones.
      serves_encoders: whether the target may be an encoder-decoder model, of which nothing but
        tokens and inputs is read.

    Raises:
      ValueError: the tree is deeper than the heads can draft, or ``sibling_sampling`` is unknown or
        does not fit the tree; the target lacks a hidden state that is read, or ``layer`` is given
        to a drafter that reads others.
    """

    num_draft: int = 0
    config: Any = None
    target: HeadTarget = unset(repr=False)
    topology: trees.Topology | None = None
    layer: int | None = None
    sibling_sampling: str = "top"
    trained_depth: int | None = dataclasses.field(default=None, compare=False, kw_only=True)
    module: ClassVar[Any] = None
    serves_encoders: ClassVar[bool] = False
    stored_settings: ClassVar[tuple[str, ...]] = ("layer",)
    can_rest = True
    takes_topology = True
    takes_sibling_sampling = True

    def __post_init__(self):
        self.check_parts()
        shapes = [vars(self.config)[field.name] for field in dataclasses.fields(self.config)]
        layers = [x for x in shapes if isinstance(x, DecoderConfig)]
        if any(x.cache_window is not None or x.cache_bits is not None for x in layers):
            raise ValueError(
                f"{self.name}: a layer of heads has no small cache and none in eight bits, and its "
                "config has cache_window and sinks, or cache_bits; give it window= or nothing"
            )
        if self.topology is None:
            object.__setattr__(self, "topology", self.default_topology)
        if self.layer is None:
            object.__setattr__(self, "layer", self.usual_layer)
        self._check_features()
        if self.depth < 1:
            raise ValueError(f"{self.name}: {self.tree} has no node below the root to be drafted")
        expand.check_sibling_sampling(self.sibling_sampling, self.tree)
        if self.max_depth is not None and self.depth > self.max_depth:
            raise ValueError(
                f"{self.name}: the tree is {self.depth} deep, and the drafter has "
                f"{self.depth_limit}: take a tree no deeper than that"
            )
        object.__setattr__(self, "num_draft", self.tree.num_nodes - 1)

    @property
    def usual_settings(self) -> dict[str, Any]:
        """The values of ``stored_settings`` that files leave out."""
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        usual["layer"] = self.usual_layer
        return {name: usual[name] for name in self.stored_settings}

    @property
    def drawing(self) -> str | None:
        """The ``sibling_sampling`` with which these heads draw their tree above temperature 0:
        ``iid`` in a chain, ``distinct`` in another static tree; None: they draw nothing."""
        if not isinstance(self.topology, trees.Tree):
            return None
        return "iid" if self.topology.is_chain else "distinct"

    def check_parts(self) -> None:
        """Raises ``ValueError`` without a configuration or a target; a subclass whose own
        ``__post_init__`` reads them calls this first."""
        if self.config is None or self.target is None:
            called = type(self).__name__
            raise ValueError(
                f"{called}() needs config= and target=, and its weights as params['drafter']: "
                f"specjax.load_drafter(folder, lm) returns a {called} with its weights"
            )

    @property
    def usual_layer(self) -> int:
        """The ``layer`` of a drafter to which none was given."""
        default = type(self).layer
        return self.target.num_layers if default is None else default

    def _check_features(self) -> None:
        """Raises ``ValueError`` for hidden states that the target lacks, and for a ``layer`` that
        is not read."""
        alone = self.features == (self.layer,)
        if not all(0 <= i <= self.target.num_layers for i in self.features):
            given, most = f"layer={self.layer}", self.target.num_layers
            raise ValueError(
                f"{self.name}: {given if alone else f'layers={self.features}'}: the target has "
                f"{most} layers; hidden states are counted from 0, the embeddings, to {most}"
            )
        if self.layer != self.usual_layer and not alone:
            raise ValueError(
                f"{self.name}: layer={self.layer}: it reads the hidden states {self.features}, "
                "which other settings name; leave layer out"
            )

    @abc.abstractmethod
    def make_level(
        self, params: PyTree, target_params: PyTree, state: PyTree, context
    ) -> tuple[Level, Any]:
        """Says how this method gives logits, for one round.

        Returns:
          ``(level, carry)`` as ``trees.expand.expand`` takes them: ``level(carry, grown, since)``
          is called once a depth, the root first, and returns logits float32 ``[B, W, V]`` of the
          tokens below the nodes ``since:`` of ``grown`` (or ``[B, 1, V]`` for all of them), and the
          ``carry`` for the next depth. The ``carry`` that is returned here goes to the first call.
        """

    @property
    def max_depth(self) -> int | None:
        """The depth of the deepest tree that can be drafted; None: any."""
        return self.config.num_heads

    def greatest_number(self, most: int) -> int | None:
        """The greatest number of tokens, up to ``most``, for which ``num="auto"`` may ask; None:
        that of the topology."""
        return None

    @property
    def default_topology(self) -> trees.Topology:
        """The tree that is drafted if ``topology`` is None: a chain of all heads."""
        return trees.chain(self.config.num_heads)

    @property
    def features(self) -> tuple[int, ...]:
        return (required(self.layer, "layer"),)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def tree(self) -> trees.Topology:
        """The tree that is drafted: ``topology``, where it was given."""
        return required(self.topology, "topology")

    @property
    def depth(self) -> int:
        return self.tree.depth

    @property
    def shapes(self) -> nnx.State:
        """The shapes and dtypes of the weights; nothing is allocated."""
        return _abstract(self.module, self.config)[1]

    def with_topology(self, topology):
        topology, most = trees.as_topology(topology, "topology"), self.trained_depth
        if most is not None and topology.depth > most:
            warnings.warn(
                f"{self.name}: {topology} is {counted(topology.depth, 'token')} deep, and its file "
                f"says that the drafter was trained for {most}; deeper tokens may seldom be right",
                stacklevel=callers.outside(),
            )
        return super().with_topology(topology)

    def heads(self, params: PyTree) -> Any:
        """The ``module`` with its weights ``params``, ``params["drafter"]`` of ``decode``."""
        try:
            return nnx.merge(_abstract(self.module, self.config)[0], params)
        except ValueError as error:
            raise ValueError(f"{self._not_its_weights}; flax: {error}") from None

    def dtype_of(self, params: PyTree) -> jnp.dtype:
        """The dtype of the weights ``params``.

        Raises:
          ValueError: there are none.
        """
        if not (leaves := jax.tree.leaves(params)):
            raise ValueError(self._not_its_weights)
        return jnp.result_type(*leaves)

    @property
    def _not_its_weights(self) -> str:
        return (
            f"params['drafter'] are not the weights of this {type(self).__name__} (or, where "
            "another drafter holds it, those at 'inner' or the like are not): give both drafter "
            "and params of one specjax.load_drafter(folder, lm)"
        )

    def words(self, params: PyTree) -> Words | None:
        """The tokens that the logits of ``make_level`` are about, where they are a part of the
        target's vocabulary; None: all of it."""
        return None

    def init(self, params, target_params, batch, capacity, inputs=None):
        dtype = self.dtype_of(params)
        return HeadState(feature=jnp.zeros((batch, self.config.hidden_size), dtype))

    def draft_step(self, params, target_params, state, context):
        level, carry = self.make_level(params, target_params, state, context)
        draft, _, _ = expand.expand(
            self.tree,
            context,
            level,
            carry,
            sibling_sampling=self.sibling_sampling,
            words=self.words(params),
        )
        return draft, state

    def observe(self, params, target_params, state, segment):
        feature = last_feature(state.feature, required(segment.features, "features"), segment.num)
        return dataclasses.replace(state, feature=feature)


def last_feature(before: jax.Array, features: jax.Array, num: jax.Array) -> jax.Array:
    """The feature of the last committed token.

    Args:
      before: ``[B, F]``, what is returned for rows in which nothing was committed.
      features: ``[B, T, F]`` of a segment.
      num: int32 ``[B]``, how many of its tokens were committed.

    Returns:
      ``[B, F]``.
    """
    last = jnp.maximum(num - 1, 0)[:, None, None]
    found = jnp.take_along_axis(features, last, axis=1)[:, 0]
    return jnp.where((num > 0)[:, None], found.astype(before.dtype), before)


def independent_level(logits: Callable[[], jax.Array]) -> tuple[Level, Any]:
    """``make_level`` for heads that read nothing of the draft: one head for each depth.

    Args:
      logits: gives float32 ``[B, K, V]`` of all K heads; called once, if anything is drafted.
    """

    def level(carry, grown, since):
        if since == 0:
            carry = logits()
        depth = depth_of(grown, since)
        return carry[:, depth : depth + 1], carry

    return level, ()


def states_of_parents(states: PyTree, grown: Draft, since: int) -> PyTree:
    """The states of the parents of the nodes ``since:`` of ``grown``, for recurrent methods.

    Args:
      states: leaves ``[D, B * P]``, of the P nodes of the depth before in each row.

    Returns:
      leaves ``[D, B * W]``, one column for each of the W nodes.
    """
    batch, wide = grown.tokens[:, since:].shape
    parent = jnp.broadcast_to(trees.parents(grown)[:, since:], (batch, wide))

    def gathered(x):
        x = x.reshape(len(x), batch, -1)
        own = parent - (since - x.shape[2])
        return jnp.take_along_axis(x, own[None], axis=2).reshape(len(x), -1)

    return jax.tree.map(gathered, states)
