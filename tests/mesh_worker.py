"""One of two processes that decode together; ``test_mesh_processes.py`` starts them.

The arguments are address, index, folder of models, and ``decode`` or ``linger``. With ``decode``
the process prints one JSON object; with ``linger`` it prints ``running`` after the first text, and
never ends.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
from asking import flat

import specjax
from specjax.analysis.staged_ppd import ppd_on_stages
from specjax.drafters import PEARL, SSD
from specjax.models import reading
from specjax.sharding import gather, join

PROMPTS = ["def main(", "import os", "class A:", "x = [1, 2, 3"]
SETTINGS = {
    "plain": dict(drafter="plain"),
    "draft": dict(drafter="draft"),
    "ngram": dict(drafter="ngram"),
    "adaptive": dict(drafter="draft", num_draft="auto"),
    "sampled": dict(drafter="draft", temperature=0.7, top_p=0.9),
    "pearl": dict(drafter="PEARL", temperature=0.7),
    "ssd": dict(drafter="SSD", temperature=0.7),
}
AHEAD = {"PEARL": functools.partial(PEARL, 3), "SSD": functools.partial(SSD, 2, fan_out=2)}
STAGED = ("plain", "draft", "sampled")
STAGES = ("data=2,stage=2", "stage=4")  # rows, or layers, that the processes share


def tokens(lm, draft, names=tuple(SETTINGS)):
    """Returns the new tokens of each setting; ``draft`` drafts for those with a draft model."""
    found = {}
    for name in names:
        options = dict(SETTINGS[name])
        if options["drafter"] == "draft":
            options["drafter"] = draft
        elif options["drafter"] in AHEAD:
            options["drafter"] = AHEAD[options["drafter"]](model=draft.target)
            options["drafter_params"] = draft.params
        out = specjax.generate(lm, PROMPTS, **flat(max_new_tokens=12, **options))
        found[name] = [row.tolist() for row in out.tokens]
    return found


def encoded(folder, mesh=None):
    """Returns ``Generation``s of encoder-decoder models.

    T5 has itself in half precision as its drafter, and Whisper itself, so that one encoder serves
    both.
    """
    t5, half = (specjax.load(folder / "t5", mesh=mesh, dtype=d) for d in ("float32", "bfloat16"))
    whisper, same = (specjax.load(folder / "whisper", mesh=mesh) for _ in range(2))
    rng, config = np.random.default_rng(0), whisper.config
    texts = [rng.integers(2, 64, size).tolist() for size in (9, 1, 30, 4)]
    features = rng.normal(size=(4, config.num_features, 2 * config.max_source))
    runs = {
        "t5": (t5, texts, dict(drafter=half)),
        "whisper": (whisper, None, dict(drafter=same, inputs=features)),
    }
    return {
        name: specjax.generate(lm, prompts, **flat(max_new_tokens=12, stop=(), **options))
        for name, (lm, prompts, options) in runs.items()
    }


def main():
    address, index, root, what = sys.argv[1:]
    folder = Path(root) / "decoder"
    jax.config.update("jax_num_cpu_devices", 2)
    join(address, 2, int(index), patience=10 if what == "linger" else 300)
    read, read_slice = [], reading.read_slice

    def counted(*given):
        piece = read_slice(*given)
        read.append(piece.nbytes)
        return piece

    reading.read_slice = counted
    lm = specjax.load(folder, mesh="model=4")
    found = {"read": sum(read), "largest": max(read)}
    while what == "linger":
        for _ in specjax.stream_text(lm, PROMPTS, drafter="plain", max_new_tokens=256, stop=()):
            print("running", flush=True)
    weight = gather(lm.params)["blocks"][0]["mlp"]["down"]["weight"].get_value()
    found["sum"] = float(weight.astype("float64").sum())
    spread = specjax.load(folder, mesh="data=2,model=2")
    found["tokens"] = tokens(spread, specjax.load(folder, mesh=spread.mesh))
    found["tokens, whole drafter"] = tokens(lm, specjax.load(folder), ["draft"])
    for mesh in STAGES:
        stages = specjax.load(folder.with_name("layers"), mesh=mesh)
        found[f"tokens, {mesh}"] = tokens(stages, specjax.load(folder), STAGED)
    out = ppd_on_stages(stages, PROMPTS[0], guesses=2, max_new_tokens=12)
    found["guessed"] = [out.tokens.tolist(), out.ticks, out.hits]
    for name, out in encoded(Path(root), spread.mesh).items():
        found[name] = [row.tolist() for row in out.tokens]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
