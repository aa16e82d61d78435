"""The base class of drafters, which propose tokens, and that of drafters around another one."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Self

import jax

from .._internal.keywords import counted
from .data import Context, Draft, PyTree, Scores, Segment
from .target import Target


class _ClassName:
    """What ``name`` is where a drafter says none: the name of its class."""

    def __get__(self, instance: object, owner: type) -> str:
        return owner.__name__


class Drafter(abc.ABC):
    """Proposes tokens that the target then scores in one pass.

    A drafter is hashable and holds no arrays (a frozen dataclass is the usual form). In every hook
    ``params`` is ``params["drafter"]`` of ``decode`` (None if there is none) and
    ``target_params`` is ``params["target"]``. Only ``num_draft`` and ``draft_step`` must be given.

    Attributes:
      name: what statistics and results call the drafter. Default: the name of the class.
      num_draft: the number of tokens drafted in a round (nodes without the root).
      num_passengers: how many of them are passengers at most, which are scored for ``readout`` and
        never accepted; see ``Draft``.
      depth: the depth of the deepest candidate. Default: ``num_draft``, a chain.
      features: the hidden states of the target that ``observe`` reads, see ``Target.verify``.
      vocab_size: the size of the vocabulary, checked against the target's; None: any.
      reads_last: ``observe`` may be shown only the end of a prompt, its last token at least.
      reads_nodes: whether ``observe`` reads what ``readout`` returned of all nodes. In a round that
        it shares with another drafter, it is shown the scores at its own nodes.
      plans: whether ``plan`` is asked before each round.
      can_rest: whether there may be rounds without a draft, in which ``sync`` stands for
        ``draft_step`` and ``observe`` is shown a draft of the root alone.
      can_rewind: whether a round may be tried again at an earlier token of the text, since what
        later rounds left in the state does not change the draft there: where the state is a cache,
        or nothing, and a shorter draft is the beginning of a longer one. ``specjax.plan`` predicts
        other draft lengths by such rounds.
      has_weights: whether any hook reads ``params``; False: ``generate`` refuses them instead of
        ignoring them.
      takes_number: whether ``for_target`` takes ``num_draft`` (``Drafting(num=...)``); False where
        that number follows from other settings.
      takes_topology: whether the tree that is drafted can be chosen, by ``with_topology`` and by
        ``for_target(topology=...)``.
      topology: the tree that is drafted, where it can be chosen; None: a chain, or the drafter
        decides by itself.
      max_depth: the deepest tree that can be drafted; None: any.
      takes_sibling_sampling: whether the drafter ranks siblings, and ``sibling_sampling`` is one of
        its fields, which ``dataclasses.replace`` changes.
      sibling_sampling: how siblings are picked, see ``trees.expand``; None: as suits the tree, or
        there is no choice.

    Example::

        @dataclasses.dataclass(frozen=True)
        class Repeat(specjax.Drafter):
            num_draft: int = 2

            def draft_step(self, params, target_params, state, context):
                tokens = jnp.repeat(context.root[:, None], self.num_draft, axis=1)
                return specjax.trees.chain_draft(context, tokens), state
    """

    num_draft: int
    num_passengers: int = 0
    features: tuple[int, ...] = ()
    vocab_size: int | None = None
    reads_last: bool = False
    reads_nodes: bool = False
    plans: bool = False
    can_rest: bool = False
    can_rewind: bool = True
    has_weights: bool = True
    takes_number: bool = True
    takes_topology: bool = False
    topology: Any = None
    max_depth: int | None = None
    takes_sibling_sampling: bool = False
    sibling_sampling: str | None = None

    name = _ClassName()

    @property
    def depth(self) -> int:
        """The depth of the deepest candidate, which is a node that may be accepted."""
        return self.num_draft

    @property
    def depth_limit(self) -> str:
        """What of the drafter makes up ``max_depth``, for errors."""
        return counted(self.max_depth or 0, "head")

    @classmethod
    def for_target(cls, target: Target, **settings) -> Self:
        """Returns the drafter that the name of a registered table stands for.

        Args:
          settings: ``num_draft`` where ``takes_number``, or ``topology`` where ``takes_topology``,
            and what the user wrote after the name. Default: fields of the drafter, whatever the
            target is.
        """
        return cls(**settings)

    def with_topology(self, topology) -> Self:
        """Returns the drafter with another tree. Default: the field ``topology`` is replaced.

        Args:
          topology: a tree of ``specjax.trees``.

        Raises:
          ValueError: the drafter lets no one choose its tree, or cannot draft this one.
        """
        if not self.takes_topology:
            raise ValueError(
                f"tree={topology}: {self.name!r} drafts no trees of one's choice; leave it out"
            )
        made: Any = self  # a dataclass, unless it implements this hook
        return dataclasses.replace(made, topology=topology)

    def init(
        self,
        params: PyTree,
        target_params: PyTree,
        batch: int,
        capacity: int,
        inputs: PyTree = None,
    ) -> PyTree:
        """Returns an empty state whose leaves all lead with B. Default: no state, ``()``."""
        return ()

    @abc.abstractmethod
    def draft_step(
        self, params: PyTree, target_params: PyTree, state: PyTree, context: Context
    ) -> tuple[Draft, PyTree]:
        """Proposes a draft whose root is ``context.root``.

        Returns:
          the draft, built with ``trees.chain_draft`` or ``trees.tree_draft``, and the state until
          ``observe``, which may have another structure than before.
        """

    def readout(self, draft: Draft, scores: Scores) -> PyTree:
        """Returns what ``observe`` is to read of ALL nodes, accepted or not, in leaves that lead
        with B; a drafter that implements it sets ``reads_nodes``. Default: None."""
        return None

    def observe(
        self, params: PyTree, target_params: PyTree, state: PyTree, segment: Segment
    ) -> PyTree:
        """Takes in what was committed: pieces of the prompt, then what each round emitted.

        Returns:
          the state, of the structure, shapes and dtypes that ``init`` gave. Default: ``state``.
        """
        return state

    def sync(
        self,
        params: PyTree,
        target_params: PyTree,
        state: PyTree,
        context: Context,
        *,
        before: str = "prompt",
    ) -> PyTree:
        """Catches up with committed tokens; the one hook of a drafter that lags behind them.

        Args:
          before: what happens next.
            ``"prompt"``: more prompt tokens are shown to ``observe``, the first of them the root,
            so everything before the root must have been read.
            ``"rest"``: a round without a draft. The drafter may go on lagging, as long as what
            such a round commits (one token) still finds room.
            ``"draft"``: ``draft_step``, after a round whose tokens another drafter may have
            proposed.

        Returns:
          the state. Default: ``state``, for a drafter that never lags.
        """
        return state

    def rewind(self, state: PyTree, length: jax.Array) -> PyTree:
        """Takes back what was committed after the first ``length`` tokens. A ``Cascade`` asks for
        it, of the drafter that drafts for its draft model, and ``Horizontal``, of all but its first
        drafter.

        Args:
          state: between rounds.
          length: int32 ``[B]``, at least 1 and at most the length that the drafter was shown. What
            follows are other tokens; the last that stays is the next root.

        Returns:
          the state. Default: ``state``, for a drafter that keeps nothing of the text.
        """
        return state

    def plan(
        self, params: PyTree, target_params: PyTree, state: PyTree, budget: jax.Array
    ) -> PyTree:
        """Decides before a round what it is to do; only asked where ``plans`` is True.

        Args:
          budget: int32 ``[B]``, tokens that each row may still emit.

        Returns:
          small arrays, which ``Context.plan`` holds in that round. It may be asked several times
          before one round.
        """
        raise NotImplementedError(f"{type(self).__name__}: plans is True, so implement plan")

    def rests(self, plan: PyTree) -> jax.Array:
        """Returns a bool scalar: whether ``plan`` means a round without a draft. Such rounds run in
        a loop of their own and cost what plain rounds cost."""
        raise NotImplementedError(f"{type(self).__name__}: plans is True, so implement rests")

    def beside(self, num_tokens: int) -> Drafter:
        """Returns a drafter like this one for rounds in which other drafters propose too, and which
        commit up to ``num_tokens`` tokens. Default: ``self``."""
        return self

    def lagging(self, num_tokens: int) -> Drafter:
        """Returns a drafter like this one that may leave unread what up to ``num_tokens`` rounds
        without a draft commit (see ``sync``); ``Adaptive`` asks for it. Default: ``self``."""
        return self

    def rewindable(self, num_tokens: int) -> Drafter:
        """Returns a drafter like this one whose state can be taken back by ``num_tokens`` tokens
        (see ``rewind``); a ``Cascade`` asks for it. Default: ``self``, which forgets nothing."""
        return self

    def shard(self, params: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
        """Returns ``params`` on the devices of a mesh. Default: as they are (then replicated)."""
        return params


class AheadDrafter(Drafter):
    """A drafter whose ``draft_step`` has two halves, the second of which may run while the target
    verifies what the first returned; see ``decoding.device_groups``."""

    @abc.abstractmethod
    def draft_ready(
        self, params: PyTree, target_params: PyTree, state: PyTree, context: Context
    ) -> tuple[Draft, PyTree]:
        """The first half: the draft without a guess, and the state for ``draft_on``.

        Args:
          target_params: None where the target is on other devices.
        """

    @abc.abstractmethod
    def draft_on(
        self, params: PyTree, target_params: PyTree, state: PyTree, context: Context, draft: Draft
    ) -> tuple[Draft, PyTree]:
        """The second half: drafts for the rounds to come.

        Args:
          draft: from ``draft_ready``.

        Returns:
          the draft with its guess, if there is one, and the state until ``observe``.
        """

    def draft_step(self, params, target_params, state, context):
        draft, state = self.draft_ready(params, target_params, state, context)
        return self.draft_on(params, target_params, state, context, draft)


@dataclasses.dataclass(frozen=True)
class DrafterWrapper(Drafter):
    """A drafter around another one, ``inner``, that does in everything what ``inner`` does.

    Subclasses override what they change. ``inner`` is given the same ``params``.
    """

    inner: Drafter

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def num_draft(self) -> int:
        return self.inner.num_draft

    @property
    def num_passengers(self) -> int:
        return self.inner.num_passengers

    @property
    def depth(self) -> int:
        return self.inner.depth

    @property
    def features(self) -> tuple[int, ...]:
        return self.inner.features

    @property
    def vocab_size(self) -> int | None:
        return self.inner.vocab_size

    @property
    def reads_last(self) -> bool:
        return self.inner.reads_last

    @property
    def reads_nodes(self) -> bool:
        return self.inner.reads_nodes

    @property
    def plans(self) -> bool:
        return self.inner.plans

    @property
    def can_rest(self) -> bool:
        return self.inner.can_rest

    @property
    def can_rewind(self) -> bool:
        return self.inner.can_rewind

    @property
    def takes_topology(self) -> bool:
        return self.inner.takes_topology

    @property
    def topology(self):
        return self.inner.topology

    @property
    def max_depth(self) -> int | None:
        return self.inner.max_depth

    @property
    def depth_limit(self) -> str:
        return self.inner.depth_limit

    @property
    def sibling_sampling(self) -> str | None:
        return self.inner.sibling_sampling

    def with_topology(self, topology):
        return dataclasses.replace(self, inner=self.inner.with_topology(topology))

    def init(self, params, target_params, batch, capacity, inputs=None):
        return self.inner.init(params, target_params, batch, capacity, inputs)

    def draft_step(self, params, target_params, state, context):
        return self.inner.draft_step(params, target_params, state, context)

    def readout(self, draft, scores):
        return self.inner.readout(draft, scores)

    def observe(self, params, target_params, state, segment):
        return self.inner.observe(params, target_params, state, segment)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        return self.inner.sync(params, target_params, state, context, before=before)

    def rewind(self, state, length):
        return self.inner.rewind(state, length)

    def plan(self, params, target_params, state, budget):
        return self.inner.plan(params, target_params, state, budget)

    def rests(self, plan):
        return self.inner.rests(plan)

    def beside(self, num_tokens):
        return dataclasses.replace(self, inner=self.inner.beside(num_tokens))

    def lagging(self, num_tokens):
        return dataclasses.replace(self, inner=self.inner.lagging(num_tokens))

    def rewindable(self, num_tokens):
        return dataclasses.replace(self, inner=self.inner.rewindable(num_tokens))

    def shard(self, params, mesh):
        return self.inner.shard(params, mesh)
