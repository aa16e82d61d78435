"""A draft model whose drafted tokens see chosen entries of its cache, sinks and a window.

    q(x_i | sinks, chosen tokens, the last ``window`` tokens),   i = 1 ... num_draft

The model reads a prompt over its whole cache. In a round it sees the first ``sinks`` tokens, the
last ``window`` ones and, between them, ``budget`` tokens that each layer and key/value head chose:
chunks that the last token's query wants most (``models.top_chunks``, TriForce), or what the end of
the prompt looked at (``models.snap_kv``, MagicDec). A round takes these entries from the cache
once, so between two choices the cost of drafting does not grow with the text. The memory does: the
cache holds every token, since a later choice may want it. (``models.small_cache`` forgets what the
window has passed, and holds ``sinks + window`` tokens.)

The entries of accepted tokens are those that the round computed, over what it saw. So the law
depends on where rounds began and ended, which rules allow: the draft states the law from which it
was drawn. What was missed, after rounds without a draft, is read over the whole cache.

As the outer level of a ``Cascade`` the model writes its text into a small cache, which is thrown
away, and reads what was accepted over the whole cache, one pass a round.

Lossless: yes (the draft states its laws), under the rules of ``DraftModel``.

Example::

    specjax.generate(lm, "...", drafter="draft:window=64,budget=512")  # chunks, chosen anew
    specjax.generate(lm, "...", drafter="draft:window=64,budget=512,observe=32")  # SnapKV
    drafter = SparseDraftModel(  # for `specjax.decode`
        num_draft=4, model=small.target, window=64, chunks=TopChunks(budget=512)
    )

References: Sun et al., TriForce, arXiv 2404.11912, section 4.1; Chen et al., MagicDec, arXiv
2408.11049, section 4; Li et al., SnapKV, arXiv 2404.14469, section 4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from .._internal.optional import required, unset
from .._internal.pytree import pytree_dataclass
from ..decoding import contract_checks as checks
from ..models.causal_lm import CausalLM
from ..models.chosen_entries import ChosenEntries
from ..models.config import SINKS
from ..models.sub_network import DecoderPart
from ..types import Target
from .draft_model import CATCH_UP, DraftModel, DraftModelState, below
from .entry_choice import ChosenChunks, chosen, no_choice, remember


@pytree_dataclass
class SparseDraftState(DraftModelState):
    """The state of a draft model that chooses entries.

    During a round ``fresh`` holds the entries of the passes and, float32 ``[B, M, F]``, the inputs
    of the layers that choose.

    Attributes:
      choice: what was chosen, and the states whose queries choose next.
    """

    choice: ChosenChunks


@dataclasses.dataclass(frozen=True)
class SparseDraftModel(DraftModel):
    """Drafts with a model that sees chosen entries; ``params["drafter"]`` holds its weights.

    Attributes:
      num_draft, topology, sibling_sampling: as of ``DraftModel``.
      model: the draft model, decoder-only and with a whole cache.
      window: how many of the last tokens a drafted token sees, itself included; at least the number
        of nodes of the draft, the root included.
      sinks: how many of the first tokens it sees besides.
      chunks: which tokens it sees between them: ``TopChunks`` or ``SnapKV``.

    Raises:
      TypeError: the model is none of ``specjax.load``, or not decoder-only.
      ValueError: as ``DraftModel`` does; there is no window or no choice; the model has a small
        cache or latent attention; sinks, budget and window would hold its whole context.
    """

    window: int = unset()
    sinks: int = SINKS
    chunks: ChosenEntries = unset()
    name = "sparse-draft"
    can_rewind = False
    keeps_text = False

    def __post_init__(self):
        super().__post_init__()
        kind = f"SparseDraftModel(model={type(self.model).__name__}"
        if not isinstance(self.model, CausalLM):
            raise TypeError(
                f"{kind}): entries are chosen in decoder-only models of specjax.load; give one of "
                "them, or DraftModel"
            )
        if self.window is None or not isinstance(self.chunks, ChosenEntries):
            raise ValueError(
                f"{kind}, window={self.window}, chunks={self.chunks}): give window= and "
                "chunks=TopChunks(budget=512) or SnapKV(budget=512); a window alone is "
                "DraftModel(model=windowed(model, window))"
            )
        if self.model.cache_window is not None or self.model.config.kv_rank:
            raise ValueError(
                f"{kind}): entries are chosen in a cache that holds every token, with keys and "
                "values of its own; give a model without a window of its own cache and without "
                "latent attention"
            )
        self.chunks.check_budget(self.model.max_positions, self.window, self.sinks)
        _ = self.part  # refuses what the model cannot have
        self._check_window(self.window)

    @property
    def part(self) -> DecoderPart:
        """The model over a small cache."""
        sinks = self.sinks + self.chunks.budget
        part = self.model.sub_network(window=self.window, sinks=sinks)
        assert isinstance(part, DecoderPart)  # a CausalLM has no other without switches
        return part

    def init(self, params, target_params, batch, capacity, inputs=None):
        state = super().init(params, target_params, batch, capacity, inputs)
        choice = no_choice(self.chunks, self.part, batch)
        return SparseDraftState(cache=state.cache, filled=state.filled, choice=choice)

    def select(self, params, state, context):
        length = jnp.maximum(context.length - 2, 0)
        state = self._chosen(params, state, context, length)
        return self.part.select(state.cache, length, state.choice.places), state

    def _chosen(self, params, state, context, length):
        """The state with entries that are chosen anew in rows whose last choice is old."""
        given = self.chunks, self.part, params, state.cache, state.choice
        return dataclasses.replace(state, choice=chosen(*given, length, context))

    def look(self, params, cache, before, grown, since, entries):
        block, skip = below(before, grown), before.shape[1]
        first = since + skip if since else 0
        layers, states = (None, None) if entries is None else entries
        given = self.part.as_target(), params, cache, block
        asked: dict[str, Any] = dict(since=first, entries=layers, features=self._read_by_choice)
        scores = checks.verified(*given, **asked)
        fresh = required(scores.features, "scores.features")
        states = fresh if states is None else jnp.concatenate([states, fresh], axis=1)
        logits = required(scores.logits, "scores.logits")
        return logits[:, since + skip - first :], (scores.entries, states)

    @property
    def _read_by_choice(self) -> tuple[int, ...]:
        return self.part.choosing_layers

    def keep(self, state, start, before: int, path, num):
        layers, states = required(state.fresh, "state.fresh")
        where = self.read_path(state, before, path)
        features = jnp.take_along_axis(states, where[..., None], axis=1)
        choice = remember(self.chunks, state.choice, features, start, num, prompt=False)
        state = dataclasses.replace(state, fresh=layers, choice=choice)
        return super().keep(state, start, before, path, num)

    def observe(self, params, target_params, state, segment):
        if segment.round is None:
            given = segment.tokens, segment.start, segment.num
            return self._read(params, state, *given, prompt=True)
        return super().observe(params, target_params, state, segment)

    def _read(self, params, state, tokens, start, num, prompt=False):
        given = params, state, tokens, start, num
        state, features = self._read_and_see(*given, features=self._read_by_choice)
        features = required(features, "features")
        choice = remember(self.chunks, state.choice, features, start, num, prompt=prompt)
        return dataclasses.replace(state, choice=choice)

    @property
    def text_model(self) -> Target:
        return self.part.as_target()

    def read_until(self, params, state, tokens, until, chunk: int = CATCH_UP):
        most = max(chunk, self.depth + 1)  # a text leaves nothing but what is read here
        return super().read_until(params, state, tokens, until, most)

    def begin_text(self, params, target_params, state, context):
        length = context.length - 1
        state = self._chosen(params, state, context, length)
        return self.part.own_cache(state.cache, length, state.choice.places), state

    def end_text(self, state, cache, length, ran):
        return state  # what is accepted is read in the next round
