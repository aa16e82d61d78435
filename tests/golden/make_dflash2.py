"""Makes the golden files of DFlash2 drafters from their authors' own code.

    USE_JAX=0 python tests/golden/make_dflash2.py DFLASH

takes a checkout of github.com/z-lab/dflash (commit 1012959 or later), of which ``dflash/model.py``
is imported, and needs torch and transformers 5. ``features/dflash2`` and ``dflash2_window`` (with
the settings of their published files: a sliding window that sees both ways, ``is_causal: false``,
``block_size`` in ``dflash_config``) each hold a random drafter for ``features/target`` in their
layout, values in bfloat16, and ``expected.npz``, computed in float32 by their greedy generation,
with the arrays that ``make_block_heads.py`` describes. Logits are the scores of the candidates,
-inf elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from feature_toys import HERE, SIZES, rounded, save
from make_block_heads import BLOCK, SAID, drafter_config, loaded
from transformers import LlamaForCausalLM, Qwen3Config

OWN = dict(conv_kernel_size=2, conv_group_size=4, selector_rank=5, selector_top_k=4)
WINDOW = dict(
    layer_types=["sliding_attention"] * 2,
    use_sliding_window=True,
    sliding_window=6,
    is_causal=False,
)


def configs(target) -> dict[str, dict]:
    plain = drafter_config(target, "DFlash2DraftModel", {}, OWN)
    window = drafter_config(target, "DFlash2DraftModel", WINDOW, OWN | dict(block_size=BLOCK))
    del window["block_size"]
    return {"dflash2": plain, "dflash2_window": window}


def watched(selector, rounds: list):
    """The authors' ``select``; the paths that it drafts and its scores are added to ``rounds``."""
    select = selector.select

    def selecting(hidden, logits, anchor_ids, temperature):
        tokens, candidates, laws = select(hidden, logits, anchor_ids, temperature)
        path = torch.cat([anchor_ids[:, None], tokens], dim=1)
        read = selector.predecessor_codebook(path[:, :-1]) * selector.hidden_projection(hidden)
        edges = torch.einsum("bdr,bdkr->bdk", read, selector.successor_codebook(candidates))
        scores = torch.full_like(logits, -torch.inf)
        scores.scatter_(2, candidates, logits.gather(2, candidates) + edges)
        assert torch.equal(scores.argmax(dim=2), tokens)
        rounds.append((path[0].numpy(), scores[0].numpy()))
        return tokens, candidates, laws

    return selecting


@torch.no_grad()
def generated(code, model, target, prompt) -> dict:
    """What the authors' whole greedy generation drafts, and how much of it is accepted."""
    rounds: list = []
    model.candidate_selector.select = watched(model.candidate_selector, rounds)
    text = code.dflash_generate(model, target, prompt[None], SAID, None)[0].numpy()
    del model.candidate_selector.select
    where, accepted = len(prompt), []
    for path, _ in rounds:
        if where + BLOCK > len(text) or len(path) < BLOCK:  # a part of them is beyond the text
            break
        assert path[0] == text[where]
        same = np.cumprod(path[1:] == text[where + 1 : where + BLOCK])
        accepted.append(int(same.sum()))
        where += accepted[-1] + 1
    drafts, logits = map(np.stack, zip(*rounds[: len(accepted)], strict=True))
    found = dict(prompt=prompt.numpy(), text=text[: where + 1], accepted=accepted)
    return found | dict(drafts=drafts, logits=logits)


def main() -> None:
    code = loaded("dflash_model", str(Path(sys.argv[1]) / "dflash" / "model.py"))
    torch.set_num_threads(1)  # the models are tiny
    target = LlamaForCausalLM.from_pretrained(HERE / "target").float().eval()
    prompt = torch.randint(SIZES["vocab_size"], (7,), generator=torch.Generator().manual_seed(7))
    for name, config in configs(target).items():
        model, best = code.DFlash2DraftModel(Qwen3Config(**config)).float().eval(), None
        for seed in range(1, 41):
            rounded(model, seed)
            told = generated(code, model, target, prompt)
            mean = np.mean(told["accepted"])
            if best is None or mean > best[0]:
                tensors = {
                    name.replace("_codebook.weight", "_codebook"): x.detach().clone()
                    for name, x in model.state_dict().items()
                }
                best = mean, tensors, told
        mean, tensors, told = best
        print(f"{name}: {mean:.2f} accepted a round")
        save(name, config, tensors, **told)


if __name__ == "__main__":
    main()
