"""One of two processes that decode together; ``test_mesh_processes.py`` starts them.

Arguments: address, index, folder of a model, ``decode`` or ``linger``. Prints one JSON object, or
``running`` once text has come, and then never ends.
"""

import json
import sys

import jax

import specjax
from specjax.models import reading
from specjax.sharding import gather, join

PROMPTS = ["def main(", "import os", "class A:", "x = [1, 2, 3"]
SETTINGS = {
    "plain": dict(drafter="plain"),
    "draft": dict(drafter="draft"),
    "ngram": dict(drafter="ngram"),
    "adaptive": dict(drafter="draft", num_draft="auto"),
    "sampled": dict(drafter="draft", temperature=0.7, top_p=0.9),
}


def tokens(lm, draft, names=tuple(SETTINGS)):
    """New tokens of each setting; ``draft``: what stands for ``drafter="draft"``."""
    found = {}
    for name in names:
        options = SETTINGS[name]
        options = options | ({"drafter": draft} if options["drafter"] == "draft" else {})
        out = specjax.generate(lm, PROMPTS, max_new_tokens=12, **options)
        found[name] = [row.tolist() for row in out.tokens]
    return found


def main():
    address, index, folder, what = sys.argv[1:]
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
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
