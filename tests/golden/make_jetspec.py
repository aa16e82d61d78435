"""Makes ``features/jetspec`` by its authors' own code.

    USE_JAX=0 python tests/golden/make_jetspec.py JETSPEC

takes a checkout of github.com/hao-ai-lab/JetSpec, and needs torch and transformers 5. The folder
holds a random drafter for ``features/target`` in its published layout, values in bfloat16, and
``expected.npz``, computed in float32 by their greedy generation of R rounds over the trees of
``accum_logp``, of N nodes each::

    prompt    int32 [T]          text   int32 [L]   prompt and what was said after it
    logits    float32 [R, D, V]  of the D places
    drafts    int32 [R, N]       tokens, node 0 the root
    parents   int32 [R, N]       -1 for the root
    accepted  int32 [R]          how many were accepted
    shape     int32 [6]          of ``trees.Expand``, in the order of its fields
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import torch
from feature_toys import HERE, SIZES, rounded, save
from make_block_heads import BLOCK, LAYERS, SAID, drafter_config
from make_dspark import Cache
from transformers import LlamaForCausalLM, Qwen3Config

from specjax import trees

SIBLINGS, BUDGET = 3, 12


def generated(model, target, prompt) -> dict:
    """What the authors' whole greedy generation drafts and accepts."""
    import jetspec.draft_head_adapter as adapter
    from jetspec.core.llm import LLM, SamplingParams
    from jetspec.core.model_runner import ModelRunner
    from jetspec.tree.baselines.accum_logp import AccumLogP

    adapter.DynamicCache = Cache
    drafter = adapter.DraftHeadTreeDrafter(model, target, BLOCK, LAYERS)
    rounds = dict(logits=[], drafts=[], parents=[])
    build = AccumLogP.build

    def kept(self, root, logits, *given, **named):
        tree = build(self, root, logits, *given, **named)
        rounds["logits"].append(logits[0].numpy())
        rounds["drafts"].append(tree.token_ids.numpy())
        rounds["parents"].append(tree.parent_indices.numpy())
        return tree

    llm = LLM.__new__(LLM)  # which would load a tokenizer
    llm.model, llm.runner, llm.device, llm.eos_token_ids = target, ModelRunner(target), "cpu", set()
    AccumLogP.build = kept
    told = llm.generate_tree(
        prompt[None],
        drafter,
        block_size=BLOCK,
        tree_width=SIBLINGS,
        budget=BUDGET,
        target_layer_ids=LAYERS,
        sampling_params=SamplingParams(0.0, SAID),
        return_stats=True,
        return_text=False,
    )
    AccumLogP.build = build
    shape = trees.whole_families(SIBLINGS, BLOCK - 1, BUDGET - 1)
    return {name: np.stack(x) for name, x in rounds.items()} | dict(
        prompt=prompt.numpy(),
        text=[*prompt.tolist(), *told["token_ids"]],
        accepted=np.asarray(told["accept_lengths"]) - 1,
        shape=[*map(int, dataclasses.astuple(shape))],
    )


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from jetspec.models.draft_head import DFlashDraftModel

    torch.set_num_threads(1)  # the models are tiny
    target = LlamaForCausalLM.from_pretrained(HERE / "target").float().eval()
    prompt = torch.randint(SIZES["vocab_size"], (7,), generator=torch.Generator().manual_seed(7))
    config = drafter_config(target, "DFlashDraftModel", {}, dict(causal_head=True))
    model = DFlashDraftModel(Qwen3Config(**config, attn_implementation="eager")).float().eval()
    best = None
    for seed in range(1, 61):  # the drafter of which most is accepted: else there is little to see
        rounded(model, seed)
        told = generated(model, target, prompt)
        mean = np.mean(told["accepted"])
        if best is None or mean > best[0]:
            best = mean, {n: x.detach().clone() for n, x in model.state_dict().items()}, told
    mean, tensors, told = best
    print(f"jetspec: {mean:.2f} accepted a round, at most {max(told['accepted'])}")
    save("jetspec", config, tensors, **told)


if __name__ == "__main__":
    main()
