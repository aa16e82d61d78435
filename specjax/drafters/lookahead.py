"""Lookahead decoding: n-grams that the target itself wrote at later positions, verified at once.

One pass does two things. Its *window* of ``window`` columns and ``ngram - 1`` levels holds the last
iterates of as many positions: level 0 begins with the root, each column goes on below its token of
level 0, and the target's most probable token after a column is the column's next iterate (see
``jacobi.py``; a column of all levels is a trajectory of Jacobi decoding). With it each column is an
n-gram: a pool keeps the ``guesses`` latest ones for each first token. Its *verification branch*
holds the n-grams that the pool has for the root, and these are the draft.

    window                     root = a0   a1   a2        candidates   the pool's n-grams after a0,
    (3 columns, 3 levels)               \\    \\    \\                    equal prefixes once
                                        b0   b1   b2
                                         |    |    |      a0 -> (b0, c0, d0)
                                        c0   c1   c2      a1 -> (b1, c1, d1)   go into the pool;
                                         |    |    |      a2 -> (b2, c2, d2)   then the levels move
                                   new: d0   d1   d2                           up by one

A node of the window sees the text, level 0 as far as its own column, and its column above itself,
at the position of its depth: the window is a part of the tree of the draft. Its nodes are
passengers, since what they hold was not meant to follow the root's text. No model drafts.

Cost of a round and row, whatever the context: a pass over ``(window + guesses) (ngram - 1)`` nodes,
the argmax at ``window`` of them, and ``window`` updates of ``guesses (ngram - 1)`` numbers. The
state is ``4 V guesses (ngram - 1)`` bytes a row: 3 MB for the settings by default and V = 32k. It
pays where a pass over all these nodes costs little more than one over a single node, as on a GPU
with a small batch; on a CPU, which is bound by arithmetic from a few nodes on, it does not.

Lossless: yes, under ``greedy``, ``delta`` and all rules that take a function of the context; the
n-grams are that function (of the rounds before).

Example::

    specjax.generate(lm, "...", drafter="lookahead:window=15,ngram=5,guesses=15")
    drafter = Lookahead(vocab_size=target.vocab_size, window=15, ngram=5, guesses=15)

Differs from the reference implementation: a full match emits the token after it as well; equal
prefixes of n-grams are scored once; all levels begin with the last tokens of the text, and columns
enter the pool from round ``ngram - 1`` on, when the target has said all of their tokens (there:
level 0 begins with tokens drawn from the prompt, and the others are appended one by one, over as
many rounds); an end of text within the window stays there (there: a token of the prompt replaces
it).

References: Fu et al., arXiv 2402.02057, section 3 and algorithm 2; LookaheadDecoding eed010d.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.host import check_table_fits
from .._internal.optional import required, unset
from .._internal.pytree import pytree_dataclass
from ..sampling import drawing
from ..types import ROOT
from . import continuations
from .base import ChainDrafter
from .jacobi import last_of_text
from .recycling import moved_to_front

MOST_NGRAM = 64


@pytree_dataclass
class LookaheadState:
    """The window and the pool of each row.

    Attributes:
      window: int32 ``[B, ngram - 1, window]``, the levels; the root stands for the first token.
      rounds: int32 ``[B]``, how often the levels have moved; more than ``ngram - 2`` and 1 are not
        counted.
      pool: int32 ``[B, V, guesses, ngram - 1]``, what followed each token, the latest first, -1
        where there is nothing.
      read: int32 ``[B]``, of ``reads_text``: the tokens of the text whose n-grams are in the pool.
    """

    window: jax.Array
    rounds: jax.Array
    pool: jax.Array
    read: jax.Array


@dataclasses.dataclass(frozen=True)
class Lookahead(ChainDrafter):
    """Drafts n-grams that the target wrote in its own window of later positions.

    Attributes:
      num_draft: follows from the settings.
      vocab_size: of the target.
      window: W, columns of the window.
      ngram: N, tokens of an n-gram; the first is the root, so ``ngram - 1`` are drafted.
      guesses: G, n-grams that the pool keeps for a token, and that a round verifies.
      reads_text: whether the n-grams of the text, prompt included, are put into the pool too.

    Raises:
      ValueError: there is no vocabulary, or a number is out of range; when decoding begins, the
        window is larger than the buffer of the text.
    """

    num_draft: int = 0
    vocab_size: int = unset()
    window: int = 7
    ngram: int = 4
    guesses: int = 7
    reads_text: bool = False
    name = "lookahead"
    has_weights = False
    can_rest = True
    reads_nodes = True
    can_rewind = False
    takes_number = False

    @classmethod
    def for_target(cls, target, **settings):
        return cls(vocab_size=target.vocab_size, **settings)

    def __post_init__(self):
        if not self.vocab_size:
            raise ValueError("Lookahead(vocab_size=None): give the size of the target's vocabulary")
        if min(self.window, self.guesses) < 1 or self.ngram < 2:
            raise ValueError(
                f"Lookahead(window={self.window}, ngram={self.ngram}, guesses={self.guesses}): "
                "need at least 1, 2 and 1"
            )
        if self.ngram > MOST_NGRAM:
            raise ValueError(
                f"Lookahead(ngram={self.ngram}): an n-gram has at most {MOST_NGRAM} tokens, of "
                "which all but the first are drafted; the authors take 3 to 7"
            )
        object.__setattr__(self, "num_draft", self.num_passengers + self.guesses * self.depth)

    @property
    def depth(self) -> int:
        return self.ngram - 1

    @property
    def num_passengers(self) -> int:
        return self.window * self.depth - 1  # the root is none

    def init(self, params, target_params, batch, capacity, inputs=None):
        if self.window > capacity:
            raise ValueError(
                f"Lookahead(window={self.window}): the buffer of the text has {capacity} slots; "
                "give a window of at most as many tokens"
            )
        check_table_fits(
            4 * batch * self.vocab_size * self.guesses * self.depth,
            f"Lookahead(guesses={self.guesses}, ngram={self.ngram}) for {batch} rows",
            "give fewer guesses, a smaller ngram, or fewer rows",
        )
        rounds = jnp.zeros((batch,), jnp.int32)
        return LookaheadState(
            window=jnp.zeros((batch, self.depth, self.window), jnp.int32),
            rounds=rounds,
            pool=jnp.full((batch, self.vocab_size, self.guesses, self.depth), -1, jnp.int32),
            read=rounds,
        )

    def draft_step(self, params, target_params, state, context):
        batch, columns = len(context.length), self.window * self.depth
        if self.reads_text:
            state = self._read(state, context)
        begun = (state.rounds > 0)[:, None]
        fresh = last_of_text(context, columns)
        window = jnp.where(begun, state.window.reshape(batch, columns), fresh)
        found = self._of(state.pool, context.root)
        first = continuations.first_with_prefix(found)
        kept = (found >= 0) & (first == jnp.arange(self.guesses)[:, None])
        # token d of guess g is node `columns + g depth + d`
        place = columns + jnp.arange(self.depth - 1)
        above = jnp.full((batch, self.guesses, 1), ROOT)
        above = jnp.concatenate([above, place + self.depth * first[:, :, :-1]], axis=2)
        level = np.arange(columns) // self.window
        parent = np.where(level, np.arange(columns) - self.window, np.arange(columns) - 1)
        both = lambda one, other: jnp.concatenate([one, other.reshape(batch, -1)], axis=1)  # noqa: E731
        riding = jnp.ones((batch, columns - 1), bool)
        draft = trees.tree_draft(
            context,
            both(window[:, 1:], jnp.maximum(found, 0)),
            both(jnp.broadcast_to(jnp.asarray(parent), (batch, columns)), above).astype(jnp.int32),
            candidate=both(~riding, kept),
            scored=both(riding, kept),
            deepest=self.depth,
        )
        return draft, state

    def readout(self, draft, scores):
        last = (self.depth - 1) * self.window  # the first column's node of the last level
        return drawing.argmax(
            required(scores.logits, "scores.logits")[:, last : last + self.window]
        )

    def observe(self, params, target_params, state, segment):
        if segment.round is None or segment.round[0].num_nodes == 1:  # a round without a draft
            return state
        draft, _, said = segment.round
        batch, last = len(said), self.window * self.depth - 1
        live = (segment.num > 0) & required(draft.scored, "draft.scored")[:, last]  # it was there
        columns = draft.tokens[:, : self.window * self.depth]
        levels = columns.reshape(batch, self.depth, self.window)
        moved = jnp.concatenate([levels[:, 1:], jnp.maximum(said, 0)[:, None]], axis=1)
        warm = max(self.ngram - 2, 1)
        own = live & (state.rounds >= self.ngram - 2)  # all tokens of the columns are the target's
        keys = jnp.where(own[:, None], levels[:, 0], self.vocab_size)

        def put(column, pool):
            return self._put(pool, keys[:, column], moved[:, :, column])

        return LookaheadState(
            window=jnp.where(live[:, None, None], moved, state.window),
            rounds=jnp.where(live, jnp.minimum(state.rounds + 1, warm), state.rounds),
            pool=jax.lax.fori_loop(0, self.window, put, state.pool),
            read=state.read,
        )

    def _of(self, pool, key):
        """int32 ``[B, guesses, ngram - 1]``: what followed ``key`` int32 ``[B]``."""
        return jnp.take_along_axis(pool, key[:, None, None, None], axis=1, mode="clip")[:, 0]

    def _put(self, pool, key, gram):
        """The pool with ``gram`` int32 ``[B, N - 1]`` after ``key`` int32 ``[B]``; V: nowhere."""
        row = moved_to_front(self._of(pool, key), gram)
        return pool.at[jnp.arange(len(key)), key].set(row, mode="drop")

    def _read(self, state, context):
        """Puts the n-grams of the text that were not read before into the pool."""
        end = jnp.maximum(context.length - self.depth, state.read)  # the first that is not whole
        end = jnp.where(context.budget > 0, end, state.read)

        def put(step, pool):
            at = state.read + step
            where = at[:, None] + jnp.arange(self.ngram)
            tokens = jnp.take_along_axis(context.tokens, where, axis=1, mode="clip")
            key = jnp.where(at < end, tokens[:, 0], self.vocab_size)
            return self._put(pool, key, tokens[:, 1:])

        pool = jax.lax.fori_loop(0, jnp.max(end - state.read), put, state.pool)
        return dataclasses.replace(state, pool=pool, read=end)
