"""Whether DSpark's confidence head says the truth: ``python -m benchmarks.calibration FOLDER``.

The head states the chance that a drafted token is accepted at temperature 1, ``1 - TV(q, p)``. The
stated chances of held-out places are sorted into ten bins. The expected calibration error is the
mean over places of how far the mean of a bin's stated chances is from that of the true ones. The
mean error of a single place is stated too. Nothing is timed, so a busy machine gives the same
figures.
"""

from __future__ import annotations

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import specjax.configs
from specjax.train import block, chunks, config, dspark, frozen, head_losses
from specjax.train.rows import make_reader
from specjax.train.step import make_keys

BINS = 10


def make_terms(target, settings):
    """Terms of a place as ``dspark.make_terms``: counts and sums for each bin, and the error."""
    del settings
    laws = head_losses.Laws(target)

    def terms_of(output, states, law, pieces):
        q, said = chunks.logits_of(output[0], states), laws.said(law, pieces)
        true = 1 - jnp.sum(jnp.abs(jax.nn.softmax(q) - said.law), axis=-1) / 2
        stated = jax.nn.sigmoid(states[..., -1])
        own = jnp.minimum((stated * BINS).astype(jnp.int32), BINS - 1)
        found = {"loss": jnp.zeros_like(true), "error": jnp.abs(stated - true)}
        for b in range(BINS):
            here = (own == b).astype(jnp.float32)
            found |= {f"count {b}": here, f"stated {b}": here * stated, f"true {b}": here * true}
        return found

    return terms_of


def main(arguments: list[str] | None = None) -> int:
    """Prints a table for each held-out set."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="what the recipe dspark exported")
    parser.add_argument(
        "fields", nargs="*", help="of the configuration embedded_dspark, name=value"
    )
    args = parser.parse_args(arguments)
    file = specjax.configs.find("embedded_dspark")
    fields = [f"init={args.folder}", "features=", "decoding.num_prompts=0", *args.fields]
    settings = config.load(dspark.Config, file, fields)
    setting = frozen.make_setting(settings, lambda count: settings.layers)
    heads, lm = dspark.make_dspark(settings, setting), setting.lm
    params = frozen.starting_params(settings, lm, heads)
    read = make_reader(lm.config, setting.end_of_text, heads.layers)
    loss = jax.jit(block.make_loss(heads, lm.target, read, settings, make_terms))
    for name, batches in setting.sets.items():
        total: dict[str, float] = {}
        for number, (tokens, weight) in enumerate(batches):
            keys = make_keys(jax.random.key(number), jnp.arange(len(tokens)))
            found = loss(params, {"target": lm.params}, {"tokens": tokens, "weight": weight}, keys)
            for term, mean in found.items():
                total[term] = total.get(term, 0.0) + float(mean.total)
        _print(name.rstrip("/") or "corpus", total, settings.num_heads)
    return 0


def _print(name: str, total: dict[str, float], places: int) -> None:
    of = functools.partial(_summed, total, places)
    counts = np.asarray([of(f"count {b}") for b in range(BINS)])
    stated = np.asarray([of(f"stated {b}") for b in range(BINS)])
    true = np.asarray([of(f"true {b}") for b in range(BINS)])
    error = np.abs(stated - true).sum() / counts.sum()
    own = of("error") / counts.sum()
    print(f"\n{name}: {counts.sum():,.0f} places, expected calibration error {error:.4f}, ")
    print(f"mean error of a place {own:.4f}\n\n| stated | places | mean stated | mean true |")
    print("|---|---|---|---|")
    for b in np.flatnonzero(counts):
        span = f"{b / BINS:.1f} to {(b + 1) / BINS:.1f}"
        means = f"{stated[b] / counts[b]:.3f} | {true[b] / counts[b]:.3f}"
        print(f"| {span} | {counts[b]:,.0f} | {means} |")


def _summed(total: dict[str, float], places: int, term: str) -> float:
    return sum(total[f"{term}_{k + 1}"] for k in range(places))


if __name__ == "__main__":
    sys.exit(main())
