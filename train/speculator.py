"""Recipe ``speculator``: an MLP or LSTM speculator, or a ReDrafter, on a frozen target.

    loss = sum_k decay ** k * mean(-log q_k(token k + 1 places ahead)),   k = 1 ... K

Training has two phases. The first reads the corpus. The second reads the mixture of ``data``, with
a learning rate schedule of its own; it should be mostly the target's own text (recipe
``regenerate``), since that is the text after which the drafter drafts. The embeddings and LM heads
of a speculator are initialized by the target's in their principal directions. Each phase is a run
that can be stopped and resumed, in ``run.folder/text`` and ``run.folder``.

References: MLP speculators, 2404.19124; LSTM speculators, Snowflake's ArcticTraining; ReDrafter,
2403.09919 (its sum over K = 5 steps is ``decay=1``).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from specjax.drafters import redrafter, speculator
from specjax.models.config import DecoderConfig
from specjax.trees.grown import Beams

from . import checkpoint, frozen, head_export
from .config import ConfigError, check_unused, resolved
from .eagle3 import layer_config, projected
from .rows import Heads, fresh

KINDS = ("mlp", "lstm", "redrafter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The first phase, over the corpus of ``data`` alone."""

    steps: int = 1000  # steps of the phase; 0: there is no first phase
    features: str = ""  # a folder of the recipe `features` for the corpus; "": the target runs

    def __post_init__(self):
        if self.steps < 0:
            raise ConfigError(f"text.steps={self.steps}; accepted: at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixConfig:
    """The prefix layer of a speculator, a Llama layer."""

    hidden_size: int = 0  # the width of the layer; 0: there is no prefix layer
    head_dim: int = 0  # of the layer; 0: the target's
    intermediate_size: int = 0  # of the layer; 0: the target's
    window: int = 0  # tokens that the layer attends to, at least data.length; 0: the whole text

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 0:
                raise ConfigError(f"prefix.{name}={value}; accepted: at least 0")
            if value and not self.hidden_size:
                raise ConfigError(
                    f"prefix.{name}={value} without prefix.hidden_size: without a width there is "
                    "no such layer; give it one, or leave both out"
                )

    def shape(self, target: DecoderConfig) -> DecoderConfig | None:
        """The shape of the layer for a target; None: there is no layer."""
        if not self.hidden_size:
            return None
        sizes = self.intermediate_size, self.hidden_size, self.head_dim
        try:
            layer = layer_config(target, *sizes)
        except ConfigError as error:
            raise ConfigError(f"prefix: {error} (prefix.hidden_size=0: no such layer)") from None
        return dataclasses.replace(layer, window=self.window or None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(frozen.FrozenConfig):
    """The shape of a speculator or a ReDrafter."""

    kind: str = "mlp"  # mlp, lstm or redrafter
    inner_size: int = 256  # the size of the state of an mlp or lstm
    tied: bool = True  # one set of weights for all steps (always so for an lstm)
    scaled: bool = True  # see specjax.drafters.speculator.SpeculatorConfig
    num_layers: int = 2  # residual blocks of a redrafter
    beams: int = 4  # beams with which a redrafter drafts
    decay: float = 1.0  # the loss of step k is weighted by decay^k; 1: a plain sum
    prefix: PrefixConfig = PrefixConfig()
    text: TextConfig = TextConfig()

    def __post_init__(self):
        super().__post_init__()
        if self.kind not in KINDS:
            raise ConfigError(f"kind={self.kind!r}; known: {', '.join(KINDS)}")
        for name, least in (("inner_size", 1), ("num_layers", 0), ("beams", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least {least}")
        reason = f"kind={self.kind} does not read it"
        if self.kind != "redrafter":
            check_unused(self, ("num_layers", "beams"), reason, "give kind=redrafter")
        else:
            own = "inner_size", "tied", "scaled"
            check_unused(self, own, reason, "give kind=mlp, or kind=lstm")
        if self.kind == "lstm" and not self.tied:
            raise ConfigError("tied=false: an lstm has one set of weights for all steps")
        if self.kind == "redrafter" and self.prefix.hidden_size:
            raise ConfigError(
                f"prefix.hidden_size={self.prefix.hidden_size}: a redrafter has no prefix layer; "
                "give prefix.hidden_size=0, or kind=lstm"
            )
        if 0 < self.prefix.window < self.data.length:
            raise ConfigError(
                f"prefix.window={self.prefix.window}; accepted: 0, or at least data.length="
                f"{self.data.length}"
            )


Config = RecurrentConfig


def make_speculator(config: RecurrentConfig, setting: frozen.Setting) -> Heads:
    """Makes an MLP or LSTM speculator with initial weights for the target of a setting."""
    lm, target = setting.lm, setting.lm.target
    shape = speculator.SpeculatorConfig(
        **setting.sizes,
        inner_size=config.inner_size,
        num_heads=config.num_heads,
        cell=config.kind,
        tied=config.tied,
        scaled=config.scaled,
        prefix=config.prefix.shape(target.config),
    )
    drafter = speculator.Speculator(config=shape, target=target)

    def outputs(params, target_params, rows):
        cell, steps = drafter.heads(params), rows.steps(config.num_heads)
        read = [rows.following(1 + k, steps) for k in range(config.num_heads)]
        states = cell.states(rows.seen_by(cell, steps), read)
        return [(cell.table(k), None, state) for k, state in enumerate(states)]

    params = fresh(drafter, config.run.seed)
    every = jnp.arange(target.vocab_size)[None]
    words = target.embed(lm.params, every).T, target.head_table(lm.params)
    embedded, said = (projected(table, config.inner_size) for table in words)
    for table in params["embeddings"].values():
        table[0] = alike(embedded, table[0])
    for head in params["lm_heads"].values():
        head["weight"] = alike(said, head["weight"])
    return Heads(drafter, params, outputs, capped=False)


def alike(table, fresh):
    """Returns ``table`` at the scale of the initial weights ``fresh`` that it replaces."""
    return table * (jnp.std(fresh) / jnp.std(table)).astype(fresh.dtype)


def make_redrafter(config: RecurrentConfig, setting: frozen.Setting) -> Heads:
    """Makes a ReDrafter with initial weights for the target of a setting."""
    target = setting.lm.target
    shape = redrafter.ReDrafterConfig(
        **setting.sizes,
        exit_size=2 * setting.sizes["hidden_size"],
        num_layers=config.num_layers,
    )
    drafter = redrafter.ReDrafter(
        config=shape, target=target, topology=Beams(config.beams, config.num_heads)
    )

    def outputs(params, target_params, rows):
        head, steps = drafter.heads(params), rows.steps(config.num_heads)
        tokens = [rows.following(1 + k, steps) for k in range(config.num_heads)]
        read = [target.embed(target_params, own[None]) for own in tokens]
        states = head.states(rows.states(0, steps), read)
        return [(head.lm_head.weight[...], None, state) for state in states]

    return Heads(drafter, fresh(drafter, config.run.seed), outputs, capped=False)


MAKERS = {"mlp": make_speculator, "lstm": make_speculator, "redrafter": make_redrafter}


def first_phase(config: RecurrentConfig) -> RecurrentConfig:
    """The configuration of the phase over the corpus alone."""
    return dataclasses.replace(
        config,
        features=config.text.features,
        data=dataclasses.replace(config.data, samples=(), samples_share=()),
        run=dataclasses.replace(
            config.run, folder=f"{config.run.folder}/text", steps=config.text.steps
        ),
    )


def phases(config: RecurrentConfig) -> list[RecurrentConfig]:
    """The configurations of the phases, as they are stored in their folders.

    The second phase starts from the weights of the first, so ``init`` is the first one's alone.
    """
    if not config.text.steps:
        return [config]
    return [first_phase(config), dataclasses.replace(config, init="")]


def run(config: RecurrentConfig, *, dry_run: bool = False) -> None:
    """Trains both phases, draws their curves, exports to ``run.folder/model``.

    A first phase that has finished is not exported and measured again.
    """
    first, *second = phases(config)
    ended = second and checkpoint.is_done(Path(first.run.folder), resolved(first))
    for phase in second if ended and not dry_run else (first, *second):
        setting = frozen.make_setting(phase)
        heads = MAKERS[phase.kind](phase, setting)
        if phase is not first and not dry_run:  # starts from the weights of the first phase
            after = dataclasses.replace(phase, init=f"{first.run.folder}/{head_export.MODEL}")
            start = frozen.starting_params(after, setting.lm, heads)
            heads = dataclasses.replace(heads, params=start)
        frozen.train(phase, setting, heads, dry_run=dry_run)
