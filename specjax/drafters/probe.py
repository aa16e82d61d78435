"""A draft model with a probe that says where its own chain goes wrong, SPRINTER's drafter.

    score(x_i) = sigmoid(w · h(x_i) + b),   h(x_i): the draft model's last hidden state at x_i

The chain ends at the first token whose score is at most ``flag``. That token stays in the draft, so
under ``rejection`` and the other rules for drawn drafts the law is the target's, and the probe only
chooses the length. Under the rule ``approximate-sprinter`` the tokens before the end of the chain
are trusted, and only the last one is verified.

The score of a token is known when the draft model has read it, which it has to do anyway to draft
the next one: the probe costs one dot product a token, and the pass over the flagged token is the
price of the flag.

Lossless: as ``DraftModel``; not under ``approximate-sprinter``.

Example::

    drafter = ProbedDraftModel(num_draft=8, model=small.target, flag=0.5)
    probe = load_probe("runs/probe/probe.safetensors", small)  # weight float32 [H], bias
    params = {"model": small.params, "probe": probe}
    specjax.decode(target, drafter, {"target": weights, "drafter": params}, ...,
                   rule="approximate-sprinter")

References: SPRINTER, arXiv 2502.04557. The paper draws up to 20 tokens, labels a token by whether
p(x) is at least q(x), and flags scores below 0.5.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .. import trees
from .._internal.optional import required
from ..decoding import contract_checks as checks
from ..trees import expand
from ..trees.levels import if_wanted
from ..types import HeadTarget
from .draft_model import DraftModel, below

FILE = "probe.safetensors"  # in the folder of the recipe's run


@dataclasses.dataclass(frozen=True)
class ProbedDraftModel(DraftModel):
    """Drafts a chain up to the first token that its probe flags.

    ``params["drafter"]`` is ``{"model": weights, "probe": {"weight": [H], "bias": []}}``.

    Attributes:
      num_draft: the most tokens of a chain.
      model: the draft model, a ``HeadTarget``.
      flag: in [0, 1]; a token is flagged if its score is at most this. With 1 every token is
        flagged, and each chain has one token; with 0 none is, unless its score is 0.

    Raises:
      ValueError: ``flag`` is out of range, ``model`` has no hidden states, or ``topology`` is no
        chain.
    """

    flag: float = 0.5
    name = "probed-draft"
    takes_topology = False

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.flag <= 1:
            raise ValueError(f"ProbedDraftModel(flag={self.flag}): flag must be from 0 to 1")
        if not isinstance(self.model, HeadTarget):
            raise ValueError(
                f"ProbedDraftModel(model={type(self.model).__name__}): the probe reads the last "
                "hidden state, so the model must be a HeadTarget"
            )
        if self.topology != trees.chain(self.num_draft):
            raise ValueError(
                f"ProbedDraftModel(topology={self.topology}): a probe ends chains; leave topology "
                "out"
            )

    def shard(self, params, mesh):
        return {"model": self.model.shard(params["model"], mesh), "probe": params["probe"]}

    def init(self, params, target_params, batch, capacity, inputs=None):
        if not isinstance(params, dict) or set(params) != {"model", "probe"}:
            raise ValueError(
                'ProbedDraftModel: params["drafter"] must be {"model": weights, "probe": probe}'
            )
        return super().init(params["model"], target_params, batch, capacity, inputs)

    def draft_step(self, params, target_params, state, context):
        weights, probe = params["model"], params["probe"]
        state, before, ran = self._begin(weights, state, context)

        def level(carry, grown, since):
            node = grown.num_nodes - 1
            entries, offered = carry or (None, context.asked_rows.astype(jnp.int32))
            going = offered >= node  # the chain has this node

            def step(entries, grown):
                return self._read_node(weights, probe, state.cache, before, grown, since, entries)

            wanted = jnp.any(going) if node else True
            found, entries = if_wanted(step, node, None, entries, grown, wanted)
            if node:
                offered = offered + (going & (found[:, 0, -1] > self.flag))
            return found[:, :, :-1], (entries, offered)

        draft, (entries, offered), place = expand.expand(
            self.topology, context, level, None, sibling_sampling=self.picks
        )
        draft = trees.limit_depth(draft, offered)
        place = jnp.broadcast_to(place, draft.tokens.shape)
        return draft, dataclasses.replace(state, fresh=entries, place=place, ran=ran)

    def _read_node(self, weights, probe, cache, before, grown, since, entries):
        """Reads the last node: its logits and its score float32 ``[B, 1, V + 1]``, and entries."""
        block, skip = below(before, grown), before.shape[1]
        first = since + skip if since else 0
        scores = checks.verified(
            self.model,
            weights,
            cache,
            block,
            since=first,
            entries=entries,
            features=(cast(HeadTarget, self.model).num_layers,),
        )
        logits = required(scores.logits, "scores.logits")[:, since + skip - first :]
        hidden = required(scores.features, "scores.features")[:, since + skip - first :]
        if probe["weight"].shape != hidden.shape[-1:]:
            raise ValueError(
                f"ProbedDraftModel: the probe's weight is {list(probe['weight'].shape)}, and the "
                f"hidden states have {hidden.shape[-1]} numbers: the probe is that of another "
                "draft model"
            )
        score = score_of(probe, hidden)
        return jnp.concatenate([logits, score[..., None]], axis=-1), scores.entries

    def observe(self, params, target_params, state, segment):
        return super().observe(params["model"], target_params, state, segment)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        return super().sync(params["model"], target_params, state, context, before=before)


def score_of(probe, hidden: jax.Array) -> jax.Array:
    """Returns float32 ``[...]``, the probe's probability that the target accepts the token.

    Args:
      probe: ``{"weight": [H], "bias": []}``.
      hidden: of a floating dtype ``[..., H]``, the draft model's last hidden state at the token.
    """
    logit = hidden.astype(jnp.float32) @ probe["weight"].astype(jnp.float32) + probe["bias"]
    return jax.nn.sigmoid(logit)


def save_probe(
    path: str | Path, probe, draft: Any, kind: str = "probe", *, separator: str | None = None
) -> None:
    """Writes a probe with the fingerprint of its draft model.

    Args:
      path: of the file.
      probe: ``{"weight": [H], "bias": []}``.
      draft: the draft model, a ``specjax.LM``.
      kind: ``probe``, or ``reward`` for the head of a reward model.
      separator: of a reward model, the text that ended a step in its training; None: not known.
    """
    tensors = {name: np.asarray(value, np.float32) for name, value in probe.items()}
    metadata = {"draft": draft.checkpoint, "name": draft.name, "kind": kind}
    metadata |= {} if separator is None else {"separator": separator}
    save_file(tensors, str(path), metadata=metadata)


def load_probe(path: str | Path, draft: Any, kind: str = "probe") -> dict[str, jax.Array]:
    """Returns the probe that ``save_probe`` wrote.

    Args:
      path: of the file.
      draft: the draft model, a ``specjax.LM``.
      kind: ``probe`` or ``reward``, as it was saved.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file holds no probe or one of another kind, the probe was trained for another
        draft model, or it holds numbers that are not finite.
    """
    try:
        opened = safe_open(str(path), framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path}: it is no safetensors file ({error})") from None
    with opened as file:
        whose, names = file.metadata() or {}, {*file.keys()}
        if names != {"weight", "bias"} or "draft" not in whose:
            raise ValueError(
                f"{path}: the file holds {', '.join(sorted(names)[:4])}, and no probe with the "
                "fingerprint of its draft model: give the file that the recipe probe wrote"
            )
        probe = {name: file.get_tensor(name) for name in ("weight", "bias")}
    if (found := whose.get("kind", "probe")) != kind:
        raise ValueError(
            f"{path}: the file holds the head of a {found}, not of a {kind}: give the file that "
            f"the recipe {kind} wrote"
        )
    if whose["draft"] != draft.checkpoint:
        raise ValueError(
            f"{path}: the {kind} was trained for the draft model {whose.get('name', 'unknown')!r} "
            f"with other weights than {draft.name!r} has: train one for it (recipe {kind})"
        )
    if not all(np.isfinite(value).all() for value in probe.values()):
        raise ValueError(f"{path}: the probe holds numbers that are not finite")
    if probe["weight"].ndim != 1 or probe["bias"].ndim:
        raise ValueError(
            f"{path}: the weight has shape {list(probe['weight'].shape)} and the bias "
            f"{list(probe['bias'].shape)}; a probe has a vector and a number"
        )
    return {name: jnp.asarray(value) for name, value in probe.items()}


def separator_of(path: str | Path) -> str | None:
    """Returns the text that ended a step when a reward model was trained; None: the file, which
    ``load_probe`` reads, does not say."""
    with safe_open(str(path), framework="numpy") as file:
        return (file.metadata() or {}).get("separator")
