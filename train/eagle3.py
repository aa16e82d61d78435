"""Recipe ``eagle3``: EAGLE-3's head on a frozen target, by training-time test.

    loss = sum_k decay ** k * mean(-sum_x p'(x) log q_k(x)),   k = 1 ... K

The sum is over K steps of the unroll (``unroll.py``): the first step reads the target's features,
the others the head's own outputs. ``p'`` is the target's law after the true tokens, restricted to
the head's vocabulary and renormalized. Positions whose most likely token is not in that vocabulary
do not count, and the mean is over the positions that count (the authors' trainer divides by all).
Another ``weighting`` replaces the powers of ``decay`` (``unroll_streaks.py``).

With ``parallel`` the recipe trains P-EAGLE, which drafts all K tokens in one pass: the steps after
the first read the embedding of a mask token and a learned vector in place of the features. Every
position is unrolled to every depth; the authors sample fewer positions for deeper steps. With
``dependency_size`` each depth after the first also reads the token before the one that it predicts;
in training that is the token of the text (``specjax/drafters/dependency.py``).

``init`` takes a trained head, or one with fewer layers, to which layers are added that at first
change nothing, or one without a dependency, to which one is added, or one with a smaller
vocabulary, to which the most frequent further tokens are added. With ``parallel`` it also takes an
EAGLE-3 head, which drafts the first token as before, and learns to draft the others at once.

References: EAGLE-3, 2503.01840; P-EAGLE, 2602.01469.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.drafters import eagle3, peagle
from specjax.models.config import DecoderConfig

from . import frozen, streaks, unroll_streaks
from .config import ConfigError
from .rows import Heads, fresh
from .unroll import unroll
from .vocabulary_map import vocab_map, widened

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
SIZES += ("max_positions", "norm_eps", "activation", "rope_theta", "rope_scaling")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3TrainingConfig(frozen.FrozenConfig):
    """The shape of an EAGLE-3 or P-EAGLE head.

    A head narrower than the target drafts faster. It has embeddings of its own, which are
    initialized, as its LM head is, by the target's in their principal directions.
    """

    num_heads: int = 7  # the steps K of the unroll
    layers: tuple[int, ...] = ()  # layers whose hidden states are read; []: the usual ones
    draft_vocab_size: int = 0  # the most frequent tokens, as the head's vocabulary; 0: all tokens
    hidden_size: int = 0  # of the head; 0: the target's
    head_dim: int = 0  # of the head; 0: the target's
    intermediate_size: int = 0  # of the head; 0: the target's
    norm_before_residual: bool = False  # see specjax.drafters.eagle3.Eagle3Config
    fc_norm: str | None = None  # see specjax.drafters.eagle3.Eagle3Config
    normed_output: bool = False  # see specjax.drafters.eagle3.Eagle3Config
    num_layers: int = 1  # layers of the head, of which the first reads embeddings
    parallel: bool = False  # P-EAGLE: all tokens are drafted in one pass
    mask_token: int = -1  # with parallel, a mask's; -1: an unused row, else end of text
    dependency_size: int = 0  # with parallel, size of the layer that reads the draft; 0: none
    window: int = 0  # tokens that the head attends to, at least data.length; 0: the whole text
    weighting: str = "decay"  # of steps: by decay; by accepted streaks: d-pace, ce-streak
    pace_floor: float = streaks.PACE_FLOOR  # alpha of d-pace: 0: by streaks, 1: step k by K+1-k
    teacher_share: float = 1.0  # always 1: the head learns the target's law

    def __post_init__(self):
        super().__post_init__()
        sizes = "draft_vocab_size", "hidden_size", "head_dim", "intermediate_size", "window"
        least = dict.fromkeys((*sizes, "dependency_size"), 0) | dict(num_layers=1)
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least {bound}")
        if 0 < self.window < self.data.length:
            raise ConfigError(
                f"window={self.window}; accepted: 0, or at least data.length={self.data.length}"
            )
        if self.dependency_size and not self.parallel:
            raise ConfigError(
                f"dependency_size={self.dependency_size} without parallel: an EAGLE-3 head reads "
                "its own draft in each pass; leave it out, or give parallel=true"
            )
        if self.mask_token != -1 and not self.parallel:
            raise ConfigError(
                f"mask_token={self.mask_token} without parallel: an EAGLE-3 head has no masks; "
                "leave it out, or give parallel=true"
            )
        unroll_streaks.check(self.weighting, self.pace_floor)
        if self.weighting != "decay" and self.decay != type(self).decay:
            raise ConfigError(
                f"decay={self.decay} with weighting={self.weighting!r}, which weighs the steps "
                "itself; leave decay out, or give weighting=decay"
            )
        if self.teacher_share != 1:
            raise ConfigError(
                f"teacher_share={self.teacher_share}: EAGLE-3 learns the target's law; leave it out"
            )


Config = Eagle3TrainingConfig


def is_longrope(target: DecoderConfig) -> bool:
    """Whether a target has the rotary scaling ``longrope``, with a factor for each frequency."""
    return dict(target.rope_scaling or ()).get("rope_type") == "longrope"


def check_rotation(teacher: str, target: DecoderConfig, reason: str, way_out: str) -> None:
    """Raises ConfigError for a target with ``longrope``, where layers have to turn as its own do.

    Args:
      teacher: the name of the target.
      target: its shape.
      reason: what its layers are needed for.
      way_out: the end of the message.
    """
    if is_longrope(target):
        raise ConfigError(
            f"teacher={teacher!r} has rotary positions of the rope_type 'longrope', which the file "
            f"of a drafter cannot express, and {reason}; {way_out}"
        )


def layer_config(
    target: DecoderConfig, intermediate_size: int = 0, hidden_size: int = 0, head_dim: int = 0
) -> DecoderConfig:
    """The shape of a drafting layer: one Llama layer, of the target's sizes by default.

    A layer of another width has as many heads as fill that width. For a target with the rotary
    scaling ``longrope`` it has plain rotary positions, over the target's context: files of drafting
    layers cannot express that scaling, and a new layer learns its own use of positions.

    Raises:
      ConfigError: the target has no rotary attention, or the heads do not fill the width.
    """
    if target.kv_rank or target.positions != "rope":
        raise ConfigError(
            f"a {target.model_type} target has no plain attention with rotary positions, whose "
            "sizes a drafting layer could take"
        )
    sizes = {name: getattr(target, name) for name in SIZES}
    if is_longrope(target):
        sizes |= dict(rope_scaling=None, max_positions=target.context_length)
    if intermediate_size:
        sizes["intermediate_size"] = intermediate_size
    width, size = hidden_size or target.hidden_size, head_dim or target.head_dim
    if (width, size) != (target.hidden_size, target.head_dim):
        heads = width // size
        if heads * size != width or size % 2:
            raise ConfigError(
                f"hidden_size={width} with head_dim={size}: heads must fill the width, and rotary "
                "positions need an even head_dim"
            )
        groups = max(n for n in range(1, target.num_kv_heads + 1) if heads % n == 0)
        sizes |= dict(hidden_size=width, head_dim=size, num_heads=heads, num_kv_heads=groups)
    return DecoderConfig(**sizes, num_layers=1)


def projected(table: jax.Array, size: int) -> jax.Array:
    """Projects rows ``[V, F]`` on their principal directions, float32 ``[V, size]``.

    Columns beyond F are zero.
    """
    table = jnp.float32(table)
    _, directions = jnp.linalg.eigh(table.T @ table)  # the largest come last
    found = table @ directions[:, ::-1][:, :size]
    return jnp.pad(found, ((0, 0), (0, size - found.shape[1])))


def draft_vocab(config: Eagle3TrainingConfig, setting: frozen.Setting, size: int) -> np.ndarray:
    """Returns the tokens of the head's vocabulary, int32 ``[size]``.

    Heads of ``init`` keep their vocabulary, to which the most frequent further tokens are added if
    it is smaller; new heads have the most frequent tokens.
    """
    counts = setting.frequencies[: setting.lm.target.config.vocab_size]
    counted = vocab_map(counts, size)
    if not config.init:
        return counted
    own = np.asarray(specjax.load_drafter(config.init, setting.lm).params.get("vocab", counted))
    if len(own) < size:
        first = counts.copy()
        first[own] = np.inf
        return vocab_map(first, size)
    return own if len(own) == size else counted  # which ``starting_params`` refuses


def grown(drafter: eagle3.Eagle3, params, vocab: np.ndarray, lm, found):
    """Makes heads like ``drafter`` from ``found``, an EAGLE-3 head or a smaller one.

    Added layers write zeros to the residual stream, and an added dependency to the states. They and
    the features of a mask are those of ``params``, new weights for ``drafter``; added tokens get
    rows by ``widened``. Heads of another kind or shape are returned as they are, but for the number
    of layers, the mask, the dependency and the vocabulary.

    Args:
      drafter: the drafter to be trained.
      params: the initial parameters of new heads.
      vocab: int32 ``[Vd]``, the vocabulary of ``drafter``, see ``draft_vocab``.
      lm: the target.
      found: what ``specjax.load_drafter`` returned.
    """
    theirs, ours = found.drafter, drafter.config
    count = ours.layer.num_layers
    kinds = (eagle3.Eagle3, type(drafter))
    if type(theirs) not in kinds or theirs.config.layer.num_layers > count:
        return found
    weights = dict(found.params)
    if ours.mask_token is not None:
        weights.setdefault("mask_hidden", params["mask_hidden"])
    if ours.dependency_size:
        silent = jax.tree.map(jnp.zeros_like, params["dependency"]["down"])
        weights.setdefault("dependency", {**params["dependency"], "down": silent})
    blocks = dict(weights["blocks"])
    for i in range(len(blocks), count):
        block = params["blocks"][i]
        attention, mlp = dict(block["attention"]), dict(block["mlp"])
        for part, name in ((attention, "o"), (mlp, "down")):
            part[name] = jax.tree.map(jnp.zeros_like, part[name])
        blocks[i] = {**block, "attention": attention, "mlp": mlp}
    weights["blocks"] = blocks
    tokens = theirs.config.draft_vocab_size
    if "vocab" in weights and tokens < ours.draft_vocab_size and not theirs.config.head_bias:
        own, rows = np.asarray(weights.pop("vocab")), np.float32(weights["lm_head"]["weight"])
        table = np.float32(drafter.target.head_table(lm.params))
        weights["lm_head"] = {"weight": jnp.asarray(widened(rows, own, vocab, table))}
        tokens = ours.draft_vocab_size
    mask = theirs.config.mask_token if type(theirs) is type(drafter) else ours.mask_token
    layer = dataclasses.replace(theirs.config.layer, num_layers=count)
    size = theirs.config.dependency_size or ours.dependency_size
    shape = dataclasses.replace(theirs.config, layer=layer, mask_token=mask, dependency_size=size)
    shape = dataclasses.replace(shape, draft_vocab_size=tokens)
    kind = type(drafter)(config=shape, target=theirs.target, layers=theirs.layers)
    return dataclasses.replace(found, drafter=kind, params=weights)


def make_eagle3(config: Eagle3TrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes an EAGLE-3 head for the target of a setting.

    Its LM head and last norm are initialized by the target's.
    """
    lm, target = setting.lm, setting.lm.target
    layers = config.layers or eagle3.usual_layers(target.config.num_layers)
    size = config.draft_vocab_size or target.config.vocab_size
    vocab = draft_vocab(config, setting, size)
    layer = layer_config(
        target.config, config.intermediate_size, config.hidden_size, config.head_dim
    )
    wide, narrow = target.config.hidden_size, layer.hidden_size
    mask, kind = None, eagle3.Eagle3
    if config.parallel:
        kind, mask = peagle.PEagle, frozen.mask_of(config.mask_token, setting)
    shape = eagle3.Eagle3Config(
        layer=dataclasses.replace(
            layer, num_layers=config.num_layers, window=config.window or None
        ),
        feature_size=wide,
        own_embedding=narrow != wide,
        num_features=len(layers),
        draft_vocab_size=size,
        norm_before_residual=config.norm_before_residual,
        fc_norm=config.fc_norm,
        normed_output=config.normed_output,
        mask_token=mask,
        dependency_size=config.dependency_size,
    )
    # an EAGLE-3 head drafts as deep as it is asked to, by steps that are alike
    most = config.num_heads if config.parallel else None
    drafter = kind(config=shape, target=target, layers=layers, trained_depth=most)
    table = target.head_table(lm.params)[vocab]
    if narrow == wide:
        params = fresh(drafter, config.run.seed, lm_head=table, vocab=vocab)
        norm = lm.params["norm"]["weight"][...]
        params["norm"]["weight"] = jnp.float32(1 + norm if target.config.norm_plus_one else norm)
    else:
        lm_head = projected(table, narrow)
        params = fresh(drafter, config.run.seed, lm_head=lm_head, vocab=vocab)
        every = jnp.arange(target.vocab_size)[None]
        params["embedding"] = projected(target.embed(lm.params, every).T, narrow)
    fixed = {name: params.pop(name) for name in ("vocab",) if name in params}

    def outputs(params, target_params, rows):
        head = drafter.heads(params | fixed)
        steps = rows.steps(config.num_heads)
        known = jnp.concatenate([rows.states(0, steps, i) for i in layers], axis=0)
        read = rows.embedded(head, target, target_params, config.num_heads)
        drafted = list(read)  # the embedding of the token before the one that each step predicts
        if config.parallel:
            blank = head.embed(jnp.full((1, 1), mask, jnp.int32), target, target_params)
            read[1:] = [jnp.broadcast_to(blank, read[0].shape)] * (config.num_heads - 1)
        outs = unroll(head, head.read(known), read, rows.segments[:, :steps])
        states = [head.norm(out) for out in outs]
        if head.dependency is not None:
            for k in range(1, len(states)):
                states[k] = head.dependency(drafted[k], states[k], states[k - 1])
        return [(head.lm_head.weight[...], None, state) for state in states]

    return Heads(
        drafter=drafter,
        params=params,
        outputs=outputs,
        layers=layers,
        vocab=vocab,
        capped=False,
        publish=lambda params: params | fixed,
        unpublish=lambda params: {name: x for name, x in params.items() if name not in fixed},
        grown=functools.partial(grown, drafter, params, vocab, lm),
    )


def run(config: Eagle3TrainingConfig, *, dry_run: bool = False) -> None:
    """Trains an EAGLE-3 or P-EAGLE head and exports it to ``run.folder/model``."""
    setting = frozen.make_setting(config, lambda n: config.layers or eagle3.usual_layers(n))
    heads, make_loss = make_eagle3(config, setting), unroll_streaks.make_loss
    frozen.train(config, setting, heads, dry_run=dry_run, make_loss=make_loss)
