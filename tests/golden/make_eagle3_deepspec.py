"""Makes the golden file of DeepSpec's EAGLE-3 heads from their authors' own code.

    USE_JAX=0 python tests/golden/make_eagle3_deepspec.py DEEPSPEC

takes a checkout of github.com/deepseek-ai/DeepSpec, and needs torch and transformers 5.
``features/eagle3_deepspec`` holds a random head for ``features/target`` in its authors' layout,
values in bfloat16, and ``expected.npz``, computed in float32 by their greedy generation of R rounds
with K drafted tokens::

    prompt    int32 [T]          text   int32 [L]   prompt and what was said after it
    logits    float32 [R, K, V]  of the head, below the root and below each token but the last
    drafts    int32 [R, K + 1]   tokens, node 0 the root
    accepted  int32 [R]          how many were accepted
"""

from __future__ import annotations

import sys
import types

import numpy as np
import torch
from feature_toys import HERE, SIZES, rounded, save
from make_dspark import Cache
from transformers import LlamaForCausalLM, Qwen3Config

DRAFTED, SAID, LAYERS = 4, 32, [0, 1, 3, 4, 5]


def head_config(target) -> dict:
    return SIZES | dict(
        architectures=["Qwen3Eagle3Model"],
        model_type="qwen3",
        head_dim=8,
        attention_bias=False,
        num_hidden_layers=1,
        draft_num_hidden_layers=1,
        num_target_layers=target.config.num_hidden_layers,
        layer_types=["full_attention"],
        tie_word_embeddings=False,
        target_layer_ids=LAYERS,
        ttt_length=DRAFTED,
        step_loss_decay=0.8,
        rope_theta=10_000.0,
    )


def generated(model, target, prompt) -> dict:
    """What the authors' whole greedy generation drafts and accepts."""
    import deepspec.eval.base_evaluator as loop
    import deepspec.eval.eagle3.evaluator as code

    loop.DynamicCache = code.DynamicCache = Cache
    drafts, logits = [], []
    own = types.SimpleNamespace(
        draft_model=model,
        max_proposal_tokens=DRAFTED,
        args=types.SimpleNamespace(temperature=0.0),
    )
    say, evaluator = model.compute_logits, code.Qwen3Eagle3Evaluator

    def saying(hidden):
        logits.append(say(hidden)[0, -1].detach().numpy())
        return say(hidden)

    def proposing(**given):
        proposal = evaluator._propose(own, **given)
        drafts.append(proposal.verify_input_ids[0].numpy())
        return proposal

    model.compute_logits = saying
    told = loop.generate_decoding_sample(
        target_model=target,
        input_ids=prompt[None],
        max_new_tokens=SAID,
        max_proposal_tokens=DRAFTED,
        temperature=0.0,
        stop_token_ids=None,
        init_context=lambda **given: evaluator._init_context(own, **given),
        propose=proposing,
        update=lambda *given: evaluator._update(own, *given),
    )
    del model.compute_logits
    return dict(
        prompt=prompt.numpy(),
        text=told.output_ids[0].numpy(),
        logits=np.stack(logits).reshape(len(drafts), DRAFTED, -1),
        drafts=np.stack(drafts),
        accepted=told.accepted_draft_lengths,
    )


@torch.no_grad()
def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from deepspec.modeling.eagle3.qwen3 import Qwen3Eagle3Model

    torch.set_num_threads(1)  # the models are tiny
    target = LlamaForCausalLM.from_pretrained(HERE / "target").float().eval()
    prompt = torch.randint(SIZES["vocab_size"], (7,), generator=torch.Generator().manual_seed(7))
    config, best = head_config(target), None
    model = Qwen3Eagle3Model(Qwen3Config(**config, attn_implementation="sdpa")).float().eval()
    tables = dict(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    for seed in range(1, 41):
        rounded(model, seed)
        model.initialize_embeddings_and_head(**tables)
        told = generated(model, target, prompt)
        mean = np.mean(told["accepted"])
        if best is None or mean > best[0]:
            best = mean, {n: x.detach().clone() for n, x in model.state_dict().items()}, told
    mean, tensors, told = best
    print(f"eagle3_deepspec: {mean:.2f} accepted a round, at most {max(told['accepted'])}")
    save("eagle3_deepspec", config, tensors, **told)


if __name__ == "__main__":
    main()
