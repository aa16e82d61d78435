"""The divergence of every scheme of few bits from the float model: ``python -m
benchmarks.quantization``.

The embedded target reads held-out texts as it ships and in each scheme, and the laws after every
token are compared (``specjax.quantization_error``). What ships is in eight bits already, a scale
for each output, so that ``int8`` changes next to nothing there. A second column therefore starts
from weights that are each moved by up to half of a step of these eight bits, and compares with the
moved model. A finished row is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import Quantization
from specjax.models import save_pretrained

from . import heldout, runner

RESULTS = Path(__file__).parent / "results" / "quantization"
SCHEMES = {
    "int8": Quantization("int8"),
    "int8, groups of 64": Quantization("int8", group_size=64),
    "fp8": Quantization("fp8"),
    "int4, groups of 32, head in float": Quantization("int4", lm_head="float"),
    "int4, groups of 32, head in int8": Quantization("int4"),
    "int4, groups of 32, head in int4": Quantization("int4", lm_head="int4"),
    "int4, groups of 64, head in float": Quantization("int4", group_size=64, lm_head="float"),
    "int4, groups of 64, head in int8": Quantization("int4", group_size=64),
    "int4, groups of 64, head in int4": Quantization("int4", group_size=64, lm_head="int4"),
}


def moved(lm, seed: int = 0):
    """The model with each number of its matrices moved by up to half of a step of eight bits."""
    rng = np.random.default_rng(seed)

    def move(weight):
        if weight.ndim < 2:
            return weight
        step = jnp.max(jnp.abs(weight), axis=-1, keepdims=True) / 127
        return weight + step * jnp.asarray(rng.uniform(-0.5, 0.5, weight.shape), weight.dtype)

    return dataclasses.replace(lm, params=jax.tree.map(move, lm.params))


def main(arguments: list[str] | None = None) -> int:
    """Measures what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=200, help="held-out texts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    texts = heldout.prompts(args.prompts)
    header = {"suite": "quantization", "prompts": args.prompts, **runner.where()}
    kept = runner.Kept(args.out, header, fresh=False)
    rows = [{"scheme": name, "moved": far} for far in (False, True) for name in SCHEMES]
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(moved(specjax.load("embedded", quantize="float")), folder)
        for row in [row for row in rows if row not in kept.finished]:
            begin = time.perf_counter()
            name = folder if row["moved"] else "embedded"
            quantized = specjax.load(name, quantize=SCHEMES[row["scheme"]])
            error = specjax.quantization_error(specjax.load(name), quantized, texts)
            kept.add({"row": row, "figures": error.as_json()})
            print(f"{row} {error} {time.perf_counter() - begin:.0f} s", flush=True)
    found = [(line["row"], line["figures"]) for line in kept.outcomes(rows)]
    (args.out / "README.md").write_text(page(header, found))
    return 0


def page(header: dict, found: list) -> str:
    """The page of the results."""
    figures = {(row["scheme"], row["moved"]): f for row, f in found}
    positions = ", ".join(sorted({f"{f['positions']:,}" for f in figures.values()}))
    facts = ", ".join(f"{k} {v}" for k, v in header.items() if v)
    lines = "\n".join(
        f"| {name} | "
        + " | ".join(
            f"{f['kl']:.2g} | {f['variation']:.2g} | {f['agreement']:.2%}"
            for f in (figures[name, False], figures[name, True])
        )
        + " |"
        for name in SCHEMES
        if {(name, False), (name, True)} <= set(figures)
    )
    return (
        "# Schemes of few bits and the float model\n\n"
        f"`python -m benchmarks.quantization`\n\n{facts}.\n\n"
        f"The embedded target reads {header['prompts']} held-out texts ({positions} tokens, at "
        "most 128 of each), and its laws at temperature 1 after each token are compared with those "
        "of the same model in a scheme: KL divergence in nats a token, total variation, and the "
        "share of tokens after which both hold the same token most probable.\n\n"
        "The target ships in eight bits, a scale for each output. `int8` is that very scheme, so "
        "its divergence is nearly 0 by construction and tells nothing about other models. On the "
        "right, therefore, each weight is first moved by up to half of a step of these eight bits, "
        "and the moved model is what the schemes are compared with. `specjax quantize --model NAME "
        "--quantize SCHEME` measures a model of your own.\n\n"
        "| scheme | KL | variation | same token | moved: KL | variation | same token |\n"
        "|---|---|---|---|---|---|---|\n"
        f"{lines}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
