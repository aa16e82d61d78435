"""The target drafts for itself, with a part of its own layers.

    q(x_i | context, x_1 ... x_{i-1}) = the head on what a sub-network says,   i = 1 ... num_draft

The sub-network is the first E layers (``exit``), or all layers but for a set of attention and MLP
sublayers (``skip``). It has the weights of the target, and it reads the target's cache of committed
tokens: nothing is copied, and there is nothing to learn from what is committed. Only the drafted
nodes have entries of their own, for the length of a round.

With ``window`` a drafted token sees only the first ``sinks`` and the last ``window`` tokens, so the
cost of drafting does not grow with the text (MagicDec). A round takes these entries from the
target's cache once, and positions stay those of the text: ``models/small_cache.py`` says why. The
part may then be the whole target.

What its first whole layers computed of the drafted nodes is what the target computes, so it is
handed to the target's pass (``Draft.partial``), which runs the other layers alone. A last pass of
these first layers reads the nodes below which nothing was drafted. With a window nothing is handed
over.

Lossless: yes (the draft states its laws), under ``rejection``, ``block``, ``traversal`` and the
other rules that judge drawn drafts; under ``greedy`` and ``delta`` too.

Differs from Draft & Verify, whose verification computes all layers anew, and which verifies with
the law of the settings what it drew from the bare softmax.

Example::

    specjax.generate(lm, "...", drafter="self:exit=8")
    drafter = SelfDraft(num_draft=4, target=lm.target, exit=8)  # for `specjax.decode`
    drafter = SelfDraft(target=lm.target, skip="attention.3-9,mlp.5,7")
    drafter = SelfDraft(target=lm.target, window=512)

References: Zhang et al., Draft & Verify, arXiv 2309.08168; Elhoushi et al., LayerSkip, arXiv
2404.16710, sections 4.2 and 4.3; Chen et al., MagicDec, arXiv 2408.11049, section 4 (the window).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from .. import trees
from .._internal.optional import required, unset
from ..decoding import contract_checks as checks
from ..models.chosen_entries import NEVER, ChosenEntries
from ..models.config import SINKS
from ..models.sub_network import DecoderPart, skipped_sublayers
from ..types import SubNetwork, Target
from .confidence_stop import ConfidenceStop
from .entry_choice import chosen, no_choice, remember
from .hand_over import hand_over, wanted_depth
from .outer_level import OuterLevel
from .part_passes import check_stop, draft_by_part, observe_stop


@dataclasses.dataclass(frozen=True)
class SelfDraft(OuterLevel):
    """Drafts a chain or a tree with a part of the target; it has no weights and no state.

    Where ``context.width`` is given, passes beyond it are left out.

    Attributes:
      num_draft: tokens of a chain; that of a tree follows from the topology.
      target: the target, whose layers draft.
      exit: E, the number of layers that run before the head; None: see ``skip``.
      skip: the sublayers that are left out, in any form that ``skipped_sublayers`` takes.
      window: how many of the last tokens a drafted token sees, itself included; None: all. It is at
        least the number of nodes of the draft, the root included.
      sinks: with a window, how many of the first tokens it sees besides.
      chunks: with a window, which further tokens it sees: ``TopChunks`` or ``SnapKV`` (see
        ``models.top_chunks``, ``models.snap_kv``); None: none.
      topology: the tree to draft (see ``trees.topology``); None: a chain of ``num_draft`` tokens.
      sibling_sampling: how children are picked (see ``trees.expand``); None: drawn (``iid``), or
        ``top`` in a tree that the drafter grows.
      stop: where a chain ends before ``num_draft`` tokens, row by row; None: nowhere.

    Raises:
      ValueError: there is no target or nothing to draft; the target has no such part; a tree is to
        be stopped; the window is smaller than the draft, or with the sinks as long as the context;
        there are sinks or chunks and no window; chunks are to be chosen in a target that is none of
        ``specjax.load``, or has latent attention, or beside ``stop``.
    """

    target: Target = unset(repr=False)
    exit: int | None = None
    skip: tuple[str, ...] = ()
    window: int | None = None
    sinks: int = SINKS
    chunks: ChosenEntries | None = None
    topology: trees.Topology | None = None
    sibling_sampling: str | None = None
    stop: ConfidenceStop | None = None
    name = "self"
    has_weights = False
    keeps_text = False

    def __post_init__(self):
        super().__post_init__()
        self._complete(self.target, "target", "the target")
        object.__setattr__(self, "skip", skipped_sublayers(self.skip))
        check_stop(self)
        if self.window is None and self.sinks != SINKS:
            raise ValueError(
                f"SelfDraft(sinks={self.sinks}): sinks are seen beside a window; give window= too"
            )
        if self.chunks is not None and self.window is not None:
            self.chunks.check_budget(self.target.max_positions, self.window, self.sinks)
        part = self.part  # refuses what the target does not have
        self._check_window(self.window)
        if self.chunks is None:
            return
        plain = isinstance(part, DecoderPart) and not part.whole.config.kv_rank
        if self.window is None or self.stop is not None or not plain:
            raise ValueError(
                f"SelfDraft(chunks={self.chunks}, window={self.window}, stop={self.stop}): entries "
                "are chosen beside a window and without stop=, in a decoder-only model of "
                "specjax.load with keys and values of its own (no latent attention)"
            )

    @property
    def features(self) -> tuple[int, ...]:
        """The hidden states from which the queries that choose entries follow."""
        return () if self.chunks is None else self._decoder_part.choosing_layers

    @property
    def reads_last(self) -> bool:
        return self.chunks is not None and self.chunks.num_queries == 1

    @property
    def can_rewind(self) -> bool:
        return self.chunks is None

    @property
    def part(self) -> SubNetwork:
        """The sub-network that drafts."""
        small: dict[str, Any] = {}
        if self.window is not None:  # targets of one's own need not know these arguments
            budget = 0 if self.chunks is None else self.chunks.budget
            small = dict(window=self.window, sinks=self.sinks + budget)
        return self.target.sub_network(exit=self.exit, skip=self.skip, **small)

    @property
    def _decoder_part(self) -> DecoderPart:
        part = self.part
        assert isinstance(part, DecoderPart)  # `__post_init__` refuses others beside chunks
        return part

    @property
    def words(self) -> str:
        """What names these layers in ``generate(drafter=...)``."""
        which = [f"skip={','.join(self.skip)}"] if self.skip else []
        which += [] if self.exit is None else [f"exit={self.exit}"]
        small = [] if self.window is None else [f"window={self.window},sinks={self.sinks}"]
        if self.chunks is not None:
            fields: Any = self.chunks  # a dataclass of numbers
            small += [f"{name}={size}" for name, size in dataclasses.asdict(fields).items()]
        which += [",".join(small)] if small else []
        return ":".join([self.name, *which])

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def rewindable(self, num_tokens):
        return dataclasses.replace(self, target=self.target.rewindable(num_tokens))

    @property
    def text_model(self) -> Target:
        return self.part.as_target()

    def text_params(self, params, target_params):
        return target_params

    def begin_text(self, params, target_params, state, context):
        length = context.length - 1
        if self.chunks is None:
            return self.part.own_cache(context.cache, length), state
        state = self._chosen(target_params, state, context, self.chunks)
        return self._decoder_part.own_cache(context.cache, length, state.places), state

    def end_text(self, state, cache, length, ran):
        return state

    def init(self, params, target_params, batch, capacity, inputs=None):
        if self.chunks is not None:
            return no_choice(self.chunks, self._decoder_part, batch)
        return () if self.stop is None else self.stop.init(batch)

    def observe(self, params, target_params, state, segment):
        if self.chunks is not None:
            if segment.round is not None and self.chunks.every == NEVER:
                return state
            features = required(segment.features, "segment.features")
            given = features, segment.start, segment.num
            return remember(self.chunks, state, *given, prompt=segment.round is None)
        return observe_stop(self, state, segment, self.depth)

    def draft_step(self, params, target_params, state, context):
        part = self.part
        if self.chunks is None:
            cache = part.select(context.cache, context.length - 1)
        else:
            state = self._chosen(target_params, state, context, self.chunks)
            cache = self._decoder_part.select(context.cache, context.length - 1, state.places)
        given = part, self.target, target_params, cache
        checked = functools.partial(checks.verified_by_part, *given)
        draft, entries, width, state = draft_by_part(checked, self, state, context)
        if not part.hands_over or context.stop_drafting is not None:  # then others change the draft
            return draft, state
        width = wanted_depth(draft, context, width)
        topology = required(self.topology, "topology")
        return hand_over(checked, topology, draft, entries, width), state

    def _chosen(self, target_params, state, context, chunks):
        """The state with entries that are chosen anew in rows whose last choice is old."""
        part, length = self._decoder_part, context.length - 1
        return chosen(chunks, part, target_params, context.cache, state, length, context)
