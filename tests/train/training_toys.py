"""Training tasks of a toy model, as recipes make them, for a few steps on the mesh of a run.

``test_scale.py`` runs them on the devices of one process, ``scale_worker.py`` on those of two.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from specjax.train import (
    block,
    distill,
    eagle3,
    frozen,
    head_losses,
    model,
    pretrain,
    scale,
    step,
    unlikelihood,
)
from specjax.train.config import DataConfig, OptimizerConfig, RunConfig
from specjax.train.optimizer import make_optimizer
from specjax.train.rows import make_reader

from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM
from specjax.models.lm import LM

ROWS, LENGTH, STEPS, END = 16, 12, 20, 0
SHAPE = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=1, head_dim=4)
CONFIG = DecoderConfig(**SHAPE, num_heads=8, num_kv_heads=8, tie_embeddings=False)
OPTIMIZER = OptimizerConfig(name="adamw", warmup=2, adam_rate=0.01)
DATA = DataConfig(length=LENGTH, batch=ROWS)


class TableTarget:
    """A target whose LM head alone is asked for: its parameters are that table."""

    vocab_size = 7

    class config:  # noqa: N801
        logit_softcap = 4.0

    def head_table(self, params):
        return params


def text() -> np.ndarray:
    """Rows of all steps, int32 ``[STEPS, ROWS, LENGTH + 1]``; documents end within them."""
    rng = np.random.default_rng(0)
    return rng.integers(END, CONFIG.vocab_size, (STEPS, ROWS, LENGTH + 1)).astype(np.int32)


def keeping(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns ``optimizer`` with the last gradients in its state."""

    def init(params):
        return {"gradients": jax.tree.map(jnp.zeros_like, params), "rest": optimizer.init(params)}

    def update(gradients, state, params):
        updates, rest = optimizer.update(gradients, state["rest"], params)
        return updates, {"gradients": gradients, "rest": rest}

    return optax.GradientTransformation(init, update)


def _task(loss, params, frozen=None) -> step.TrainingTask:
    return step.TrainingTask(loss, params, None, None, frozen, adjust=keeping)


def pretraining() -> step.TrainingTask:
    return _task(pretrain.make_loss(CONFIG, END), model.create(CONFIG, 0)[1])


def unlearning() -> step.TrainingTask:
    config = unlikelihood.Config(ngram=2, prompt_tokens=4, data=DATA)
    return _task(unlikelihood.make_loss(CONFIG, END, config), model.create(CONFIG, 0)[1])


def distilling() -> step.TrainingTask:
    _, params = model.create(CONFIG, 0)
    _, teacher = model.create(CONFIG, 1)
    sizes = dict(hidden_size=16, intermediate_size=32, num_layers=1, head_dim=4)
    shape = model.ModelConfig(**sizes, num_heads=8, num_kv_heads=8, tie_embeddings=False)
    config = distill.Config(model=shape, divergence="jsd", data_share=0.25, data=DATA)
    return _task(distill.make_loss(distill.Pair(CONFIG, CONFIG, END), config), params, teacher)


def eagle3_head() -> step.TrainingTask:
    _, teacher = model.create(CONFIG, 1)
    lm = LM(CausalLM(CONFIG), teacher, None, "toy", "")
    config = eagle3.Config(num_heads=2, layers=(0, 1), draft_vocab_size=16, data=DATA)
    counts = np.arange(CONFIG.vocab_size, 0, -1.0)
    setting = frozen.Setting(lm, END, None, {}, counts, {})
    made = eagle3.make_eagle3(config, setting)
    read = make_reader(CONFIG, END, made.layers)
    loss = head_losses.make_loss(made, lm.target, read, config)
    return _task(loss, made.params, {"target": teacher})


def block_drafter() -> step.TrainingTask:
    _, teacher = model.create(CONFIG, 1)
    lm = LM(CausalLM(CONFIG), teacher, None, "toy", "")
    config = block.Config(num_heads=2, num_layers=1, layers=(1,), num_anchors=3, data=DATA)
    made = block.make_block(config, frozen.Setting(lm, END, None, {}, None, {}))
    loss = block.make_loss(made, lm.target, make_reader(CONFIG, END, made.layers), config)
    return _task(loss, made.params, {"target": teacher})


JOBS = {
    "pretrain": pretraining,
    "unlikelihood": unlearning,
    "distill": distilling,
    "eagle3": eagle3_head,
    "block": block_drafter,
}


def trained(name: str, run: RunConfig, steps: int = STEPS) -> dict:
    """``gradients`` of the first step, ``losses`` of all, and the ``state`` after the last."""
    task, layout = JOBS[name](), scale.layout_of(run, ROWS)
    optimizer = task.adjust(make_optimizer(OPTIMIZER, STEPS))
    state = step.make_state(task, optimizer, 0, layout)
    advance = step.make_step(task, optimizer, run, layout)
    given, losses = layout.place(step.rounded(task.frozen, run)), []
    index, count = scale.host_share(layout.mesh)
    for rows in text()[:steps]:
        with layout.using():
            state, found = advance(state, given, layout.rows(rows[index::count]))
        losses.append(float(found["loss"]))
        if len(losses) == 1:
            gradients = jax.tree.leaves(layout.whole(state["optimizer"]["gradients"]))
    return {"gradients": [np.asarray(x) for x in gradients], "losses": losses, "state": state}


def assert_same(found: dict, wanted: dict) -> None:
    """Compares first gradients to 1e-5 of each array's greatest value, and losses to 1e-4."""
    for own, true in zip(found["gradients"], wanted["gradients"], strict=True):
        np.testing.assert_allclose(own, true, rtol=0, atol=1e-5 * np.abs(true).max())
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=0, atol=1e-4)


def forward(graphdef, params, tokens, segments):
    """Logits float32 ``[B, T, V]`` of a decoder at all positions."""
    return nnx.merge(graphdef, params)(tokens, segments)


def logits_of(output):
    """Logits ``[V, M]`` of one of the ``outputs`` of ``rows.Heads``."""
    table, bias, state = output
    return table @ state if bias is None else table @ state + bias[:, None]


def with_batches(name: str, shard: tuple[int, int], at=lambda step: None) -> step.TrainingTask:
    """Returns a task over the same text for the loop; ``at(step)`` is called as rows are read."""
    import grain

    index, count = shard
    rows = grain.MapDataset.source(text().reshape(-1, LENGTH + 1))
    rows = rows.slice(slice(index, None, count)).batch(ROWS // count)
    rows = rows.map_with_index(lambda number, batch: (at(number + 1), batch)[1])
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return dataclasses.replace(
        JOBS[name](),
        batches=iter(rows.to_iter_dataset(reading)),
        evaluate=lambda params, given: {"heldout_loss": 0.0},
    )
