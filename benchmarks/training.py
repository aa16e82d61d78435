"""EAGLE-3's training step, its parts and memory; its head beyond the length of training rows.

The step is that of the recipe (``train/eagle3.py``, ``train/loop.py``), for the embedded target or
a small one with random weights, since time and memory do not depend on the values of weights.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from specjax.train import eagle3, evaluate, frozen, head_losses, loop, model, pretrain
from specjax.train.config import DataConfig, OptimizerConfig
from specjax.train.optimizer import make_optimizer
from specjax.train.rows import make_reader

import specjax
from specjax import trees
from specjax.analysis import timing
from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM
from specjax.models.lm import LM

from .figures import interval, spread

SMALL = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


def _lm(config: DecoderConfig, params) -> LM:
    return LM(CausalLM(config), params, None, "toy", "")


def _task(lm: LM, length: int, steps: int):
    """Returns EAGLE-3's task, its heads, and the task of the same heads on stored hidden states."""
    size = lm.target.vocab_size
    config = eagle3.Config(num_heads=steps, data=DataConfig(length=length))
    setting = frozen.Setting(lm, size, None, {}, np.arange(size, 0, -1.0), None)
    made = eagle3.make_eagle3(config, setting)
    read = make_reader(lm.config, setting.end_of_text, made.layers)

    def task(read):
        loss = head_losses.make_loss(made, lm.target, read, config)
        return loop.TrainingTask(loss, made.params, None, None, {"target": lm.params})

    return task(read), task(lambda params, rows: rows), made, read


def training(
    bench,
    *,
    target: str,
    lengths: list[int],
    steps: int,
    batch: int = 1,
    timed: int | None = None,
    optimizer: str = "muon",
    repetitions: int = 7,
) -> dict:
    """Measures the working memory of the compiled step for rows of several lengths, and its time.

    Args:
      bench: the state of the run.
      target: ``embedded``, or ``small`` with random weights.
      lengths: the lengths of rows, in tokens.
      steps: the steps of the unroll.
      batch: the rows of a step.
      timed: the length at which the step is timed; None: it is not timed.
      optimizer: the name of the optimizer.
      repetitions: how often the step and its parts are timed.

    Returns:
      ``bytes`` by length; for several lengths ``bytes_per_token``, the slope of the line through
      them, and ``off_the_line``, the greatest distance from that line as a share. In seconds:
      ``step``, the whole compiled step; ``target``, the forward pass for the hidden states;
      ``head``, the loss of the head on these and its gradient (with the target's law); ``update``,
      the optimizer. ``over_parts`` is the ratio of the step to target and head, ``over_all`` that
      to all three.
    """
    lm = specjax.load(target) if target != "small" else _lm(SMALL, model.create(SMALL, 0)[1])
    rule, compiled, parts = make_optimizer(OptimizerConfig(name=optimizer), 1000), {}, {}
    for length in lengths:
        task, alone, made, read = _task(lm, length, steps)
        state = jax.eval_shape(lambda task=task: loop.make_state(task, rule, 0))
        tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
        compiled[length] = loop.make_step(task, rule).lower(state, task.frozen, tokens).compile()
        if length == timed:
            parts = task, alone, read
    held = {n: c.memory_analysis().temp_size_in_bytes for n, c in compiled.items()}
    weights = int(sum(x.size for x in jax.tree.leaves(made.params)))
    figures = {"bytes": held, "weights": weights}
    if len(held) > 1:
        tokens, found = batch * np.asarray([*held], float), np.asarray([*held.values()], float)
        slope, rest = np.polyfit(tokens, found, 1)
        figures["bytes_per_token"] = float(slope)
        figures["off_the_line"] = float(np.max(np.abs(slope * tokens + rest - found) / found))
    if timed is not None:
        figures |= _timed(compiled[timed], *parts, rule, (batch, timed + 1), repetitions)
    return figures


def _timed(step, task, alone, read, rule, shape, repetitions: int) -> dict:
    """Returns the seconds of a compiled step and of its parts, each compiled alone."""
    state = loop.make_state(task, rule, 0)
    size = task.frozen["target"]["embedding"].shape[0]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, size, shape), jnp.int32)
    read, given = jax.jit(read), task.frozen
    rows = jax.block_until_ready(read(given["target"], tokens))
    loss = lambda p, given, rows: evaluate.weighed(alone.loss(p, given, rows, None))  # noqa: E731
    head = jax.jit(jax.value_and_grad(loss))
    _, gradients = head(task.params, given, rows)

    @jax.jit
    def update(params, moments, gradients):
        updates, moments = rule.update(gradients, moments, params)
        return jax.tree.map(jnp.add, params, updates), moments

    calls = {
        "step": timing.Call(
            lambda state: step(state, given, tokens), lambda: jax.tree.map(jnp.copy, state)
        ),
        "target": lambda: read(given["target"], tokens),
        "head": lambda: head(task.params, given, rows),
        "update": lambda: update(task.params, state["optimizer"], gradients),
    }
    seconds = timing.alternate(calls, repetitions=repetitions, warmup=1)
    both = seconds["target"] + seconds["head"]
    return {
        "seconds": {name: spread(x) for name, x in seconds.items()},
        "over_parts": interval(timing.ratio(seconds["step"], both)),
        "over_all": interval(timing.ratio(seconds["step"], both + seconds["update"])),
    }


# ---------------------------------------------------------------- contexts beyond training rows

LAG, SYMBOLS = 5, 16
TOY = DecoderConfig(
    vocab_size=SYMBOLS,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    window=4 * LAG,
    max_positions=16_384,
)


def follow(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns the next token of the toy language after each position, ``[B, T - LAG + 1]``.

    It follows from the last token and from the token ``LAG - 1`` places before it.
    """
    return table[tokens[:, LAG - 1 :], tokens[:, : tokens.shape[1] - LAG + 1]]


def write(rng, table: np.ndarray, batch: int, length: int, noise: float = 0.05) -> np.ndarray:
    """Returns text in the toy language, int32 ``[batch, length]``; ``noise`` replaces symbols."""
    tokens = rng.integers(0, SYMBOLS, (batch, length + LAG)).astype(np.int32)
    kept = rng.random(tokens.shape) >= noise
    for i in range(LAG, length + LAG):
        said = table[tokens[:, i - 1], tokens[:, i - LAG]]
        tokens[:, i] = np.where(kept[:, i], said, tokens[:, i])
    return tokens[:, LAG:]


def _taught(task: loop.TrainingTask, steps: int, rows):
    """Trains for some steps on ``rows()``; returns the parameters and the last loss."""
    rule = make_optimizer(OptimizerConfig(warmup=min(20, steps), weight_decay=0.0), steps)
    step, state = loop.make_step(task, rule), loop.make_state(task, rule, 0)
    for _ in range(steps):
        state, metrics = step(state, task.frozen, rows())
    return state["params"], float(metrics["loss"])


def long_context(
    bench,
    *,
    contexts: list[int],
    taught: int = 64,
    window: int = 64,
    target_steps: int = 600,
    head_steps: int = 600,
    rows: int = 32,
    batch: int = 4,
    new: int = 32,
) -> dict:
    """Measures acceptance after contexts of several lengths, for a head trained on short rows.

    The head is trained on rows of ``taught`` tokens, and measured as it is and with a window of
    ``window`` tokens. Text and target are toys: each symbol follows from the last one and from the
    one four places before it, and the target sees 20 tokens, so that it is as good at any length.
    Decoding is greedy, and all contexts of a row end in the same tokens. The figure ``follows`` is
    the share of the target's tokens that are those of the language.
    """
    rng = np.random.default_rng(0)
    table = rng.integers(0, SYMBOLS, (SYMBOLS, SYMBOLS)).astype(np.int32)

    def sample():
        return jnp.asarray(write(rng, table, rows, taught + 1))

    _, params = model.create(TOY, 0)
    task = loop.TrainingTask(pretrain.make_loss(TOY, SYMBOLS), params, None, None)
    params, target_loss = _taught(task, target_steps, sample)
    lm = _lm(TOY, params)
    task, _, made, _ = _task(lm, taught, 3)
    weights, head_loss = _taught(task, head_steps, sample)

    text = write(rng, table, batch, max(contexts))
    both = {"target": params, "drafter": made.publish(weights)}
    whole = dataclasses.replace(made.drafter, topology=trees.chain(3))
    layer = dataclasses.replace(whole.config.layer, window=window)
    config = dataclasses.replace(whole.config, layer=layer)
    drafters = {"all": whole, "window": dataclasses.replace(whole, config=config)}
    found: dict[str, dict] = {name: {} for name in drafters}
    follows = {}
    for name, drafter in drafters.items():
        for context in contexts:
            tokens = np.zeros_like(text)
            tokens[:, :context] = text[:, -context:]
            out = specjax.decode(
                lm.target,
                drafter,
                both,
                jnp.asarray(tokens),
                jnp.full(batch, context, jnp.int32),
                key=jax.random.key(0),
                max_new_tokens=new,
            )
            said = np.asarray(out.tokens)[:, context - LAG : context + new]
            follows[context] = float(np.mean(follow(table, said)[:, :-1] == said[:, LAG:]))
            depths = np.asarray(out.stats.accepted_at).sum(axis=0) / np.sum(out.stats.rounds)
            found[name][context] = {"tau": out.stats.tau, "accepted_at": depths.tolist()}
    return {"losses": [target_loss, head_loss], "follows": follows, **found}
