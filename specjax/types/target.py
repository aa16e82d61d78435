"""The base classes of targets: models that score drafts."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
import numpy as np

from .data import Draft, PyTree, Scores, Verdict


class Target(abc.ABC):
    """A model that scores drafts.

    A target is hashable and holds no arrays (a frozen dataclass is the usual form); its weights
    are ``params``, which is ``params["target"]`` of ``decode``. ``verify`` only reads the cache,
    so that rollback, rounds of several widths and drafting with a part of the target copy
    nothing; ``commit`` is the only writer, of at most D + 1 entries a row.

    Attributes:
      vocab_size: V, the width of the logits. Must be set.
      max_positions: the longest sequence that the model can read, or None for no limit.
      approximate: why the output is not that of the model itself (for instance, "quantized to
        int8"); it is shown with every result. Empty where the output is exact.
      quantized: the scheme to which the weights were quantized, or None.
      reads: what an encoder-decoder model's encoder reads, ``"tokens"`` or ``"features"``; None
        for a model that reads nothing but its prompt.
      parts: the targets that this one is made of, if any.
      reads_vectors: whether ``verify`` reads ``Draft.vectors``.
      picks_logits: whether ``verify`` takes, as ``logits``, int32 ``[B]``, one node of each row,
        and returns the logits ``[B, 1, V]`` of these nodes alone. Where it does, the pass over the
        end of a prompt emits the first token; elsewhere that takes a pass of its own.
      stages: the number of devices of the mesh axis ``stage`` over which the layers are divided; 1:
        each device has all layers.
      cache_window: how many of the last tokens a cache for drafting keeps, beside sinks, where it
        does not grow with the text (see ``models.small_cache``); None: it grows.

    Example::

        @dataclasses.dataclass(frozen=True)
        class Bigram(specjax.Target):
            vocab_size: int

            def init(self, params, batch, capacity, inputs=None):
                return jnp.zeros((batch, 1))  # a bigram model remembers nothing

            def verify(self, params, cache, draft, *, features=(), since=0, entries=None,
                       logits=True):
                scores = params["table"][draft.tokens[:, since:]]  # float32 [B, N, V]
                return specjax.Scores(logits=scores, features=None, entries=cache)

            def commit(self, cache, entries, start, verdict):
                return cache
    """

    vocab_size: int
    max_positions: int | None = None
    approximate: str = ""
    quantized: str | None = None
    reads: str | None = None
    parts: tuple[Target, ...] = ()
    reads_vectors: bool = False
    picks_logits: bool = False
    cache_window: int | None = None
    stages: int = 1

    @abc.abstractmethod
    def init(self, params: PyTree, batch: int, capacity: int, inputs: PyTree = None) -> PyTree:
        """Makes an empty cache.

        Args:
          params: the weights.
          batch: B, the number of rows.
          capacity: S, the number of tokens that a row can hold.
          inputs: what ``decode(inputs=...)`` was given (encoder memory), or None.

        Returns:
          a pytree whose leaves all lead with B. ``commit`` must keep its structure, shapes and
          dtypes.
        """

    @abc.abstractmethod
    def verify(
        self,
        params: PyTree,
        cache: PyTree,
        draft: Draft,
        *,
        features: tuple[int, ...] = (),
        since: int = 0,
        entries: PyTree = None,
        logits: bool | jax.Array = True,
    ) -> Scores:
        """Scores nodes ``since:`` of a draft in one pass. Reads the cache, never writes it.

        Node ``n`` sees the committed prefix (the cache's entries of positions below
        ``draft.start``), its ancestors in the draft, and itself. Its position is
        ``draft.start + depth``; a node at a negative position does not exist and is seen by none.
        The cache may hold later positions than these, as that of a draft model does: a recurrent
        model keeps one state for each position, and reads the one at ``draft.start - 1``.

        Args:
          features: which hidden states are returned, counted as in ``hidden_states`` of Hugging
            Face (0: the embeddings; the last: normed); empty: none.
          since: the number of leading nodes that went through an earlier pass.
          entries: of those nodes, as the earlier pass returned them; None where ``since`` is 0.
          logits: whether logits are needed; where False, ``Scores.logits`` is None. A target whose
            ``picks_logits`` is True also takes int32 ``[B]``, one node of each row.

        Returns:
          ``Scores`` with logits float32 ``[B, N - since, V]``, or ``[B, 1, V]`` of the nodes that
          ``logits`` names, features ``[B, N - since, F]`` (F:
          all asked hidden states side by side) or None, and the entries of ALL nodes, those of
          ``entries`` first.
        """

    @abc.abstractmethod
    def commit(self, cache: PyTree, entries: PyTree, start: jax.Array, verdict: Verdict) -> PyTree:
        """Writes the entries of accepted nodes into the cache.

        Args:
          entries: of all nodes, as ``verify`` returned them.
          start: int32 ``[B]``, the position of the root.
          verdict: in row ``b``, the entries of nodes ``path[b, :count[b] + 1]`` belong at positions
            ``start[b], start[b] + 1, ...``; a row with ``count`` -1 stays as it is.

        Returns:
          the cache, of the same structure, shapes and dtypes.
        """

    def sub_network(
        self,
        *,
        exit: int | None = None,
        skip: tuple[str, ...] = (),
        window: int | None = None,
        sinks: int = 0,
        switched: bool = False,
    ) -> SubNetwork:
        """Returns a part of this target that drafts over the target's own weights and cache.

        Args:
          exit: the number of layers that run before the head; None: all.
          skip: the sublayers that are left out, such as ``"attention.3"`` and ``"mlp.5"``.
          window: how many of the last tokens a token sees while it is drafted, itself included;
            None: all, and then ``window`` and ``sinks`` are not passed.
          sinks: how many of the first tokens it sees besides these.
          switched: whether an array says which sublayers run; ``params`` of the part are then the
            target's weights and bool ``[L, 2]``, whether attention and MLP of each layer run. No
            other argument is given beside it, and where it is False it is not passed.

        Raises:
          ValueError: the target has no such part. Default: it has none at all.
        """
        raise ValueError(
            f"sub_network: a {type(self).__name__} has no sub-networks, so it cannot draft for "
            "itself; accepted are the decoder-only models of specjax.load and targets that "
            "implement sub_network; take another drafter, such as 'ngram'"
        )

    def rewindable(self, num_tokens: int) -> Target:
        """Returns this model with caches from which the last ``num_tokens`` tokens can be taken
        back: others are then committed in their place. Default: ``self``, whose caches keep
        everything."""
        return self

    def activation_dtype(self, params: PyTree) -> np.dtype:
        """Returns the dtype of the activations. Default: that of the first floating weight."""
        floats = (x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating))
        return next((x.dtype for x in floats), jnp.dtype("float32"))

    def check_inputs(self, batch: int, inputs: PyTree) -> None:  # noqa: B027
        """Raises ``ValueError`` for ``inputs`` that this target cannot read. Default: takes all."""

    def shard(self, params: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
        """Returns ``params`` on the devices of a mesh. Default: as they are (then replicated)."""
        return params


class SubNetwork(abc.ABC):
    """A part of a target, which drafts over the weights and the cache of the whole.

    A sub-network is hashable and holds no arrays. It has no cache of its own: it reads the entries
    of committed tokens in the target's cache, and keeps only those of drafted nodes.

    Attributes:
      hands_over: whether the target's pass can go on from the entries (``Draft.partial``). Where
        it cannot, it computes everything anew.
    """

    hands_over: bool = False

    def select(self, cache: PyTree, length: jax.Array) -> PyTree:
        """Returns what the passes of a round read of the target's cache. Default: all of it.

        Args:
          cache: of the target; it is only read.
          length: int32 ``[B]``, how many entries it holds: the position of the root.
        """
        return cache

    def as_target(self) -> Target:
        """Returns this part as a target of its own, over caches of ``own_cache``: a ``Cascade`` has
        another drafter draft for it.

        Raises:
          ValueError: a round would have to copy the target's whole cache, which nothing but the
            target may write. Default.
        """
        raise ValueError(
            f"{type(self).__name__}: this part reads the whole cache of its target, and cannot "
            "write a text of its own without a copy of it; give it a window (window=512)"
        )

    def own_cache(self, cache: PyTree, length: jax.Array) -> PyTree:
        """Returns what ``select`` returns as a cache that ``as_target()`` may write.

        Its size does not depend on the length of the text. Entries of layers with sliding windows
        of their own, whose rings ``select`` leaves as they are, are copied once a round; the window
        bounds them. Default: there is none, see ``as_target``.
        """
        raise NotImplementedError(f"{type(self).__name__} has as_target: implement own_cache")

    @abc.abstractmethod
    def verify(
        self,
        params: PyTree,
        cache: PyTree,
        draft: Draft,
        *,
        features: tuple[int, ...] = (),
        since: int = 0,
        entries: PyTree = None,
        logits: bool = True,
    ) -> Scores:
        """Scores nodes ``since:`` of a draft as ``Target.verify`` does, by this part alone.

        Args:
          params: the weights of the target.
          cache: what ``select`` returned in this round; it is only read.
          features: which hidden states are returned, counted as the target counts them; only those
            that this part computes as the target does. Empty: none.
          logits: whether logits are needed; where False, only what the target's pass can take over
            is computed, and ``Scores.logits`` is None.

        Returns:
          ``Scores`` with the hidden states that were asked for, and with the entries of ALL nodes,
          those of ``entries`` first.

        Raises:
          ValueError: while tracing: a hidden state that this part does not compute as the target
            does.
        """


class HeadTarget(Target):
    """A target of which draft heads can read embeddings, hidden states and the LM head.

    Columns are feature-major: ``[H, M]`` holds M states of H numbers each.

    Attributes:
      num_layers: hidden states are counted from 0 (the embeddings) to this (the last, normed).
      hidden_size: H, the width of each hidden state; None where it is not known beforehand.
    """

    num_layers: int
    hidden_size: int | None = None

    @abc.abstractmethod
    def embed(self, params: PyTree, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings of ``tokens`` int32 ``[B, N]``, of a floating dtype
        ``[H, B * N]``."""

    @abc.abstractmethod
    def head(self, params: PyTree, hidden: jax.Array, batch: int) -> jax.Array:
        """Returns logits float32 ``[B, N, V]`` of ``[H, B * N]`` states like the last hidden state,
        which is normed."""

    def head_table(self, params: PyTree) -> jax.Array:
        """Returns the LM head's weight ``[V, H]``; where it is tied, the embedding table."""
        raise NotImplementedError(
            f"{type(self).__name__}.head_table is not implemented, and this drafter or recipe "
            "reads the LM head's weight: implement it, returning [vocab_size, hidden_size]"
        )
