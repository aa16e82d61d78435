"""Makes the golden files of DSpark drafters from their authors' own code.

    USE_JAX=0 python tests/golden/make_dspark.py DEEPSPEC

takes a checkout of github.com/deepseek-ai/DeepSpec, and needs torch and transformers 5. Each of
``features/dspark``, ``dspark_gated``, ``dspark_rnn`` and ``dspark_bare`` (no heads: DeepSpec's
DFlash) holds a random drafter for ``features/target`` in its authors' layout, values in bfloat16,
and ``expected.npz``, computed in float32 by their greedy generation of R rounds:

    prompt    int32 [T]        text      int32 [L]      prompt and what was said after it
    logits    float32 [R, K, V]  after the Markov head, each given the tokens drafted before it
    chances   float32 [R, K]   the sigmoid of the confidence head (absent without one)
    drafts    int32 [R, K + 1] tokens, node 0 the root
    proposed  int32 [R]        how many were proposed, with ``least`` as confidence threshold
    accepted  int32 [R]        how many were accepted
    least     float32 [1]
"""

from __future__ import annotations

import sys
import types

import numpy as np
import torch
from feature_toys import HERE, MASK, SIZES, rounded, save
from transformers import DynamicCache, LlamaForCausalLM, Qwen3Config

BLOCK, RANK, SAID, LAYERS = 4, 5, 32, [1, 3, 5]
KINDS = {
    "dspark": dict(markov_rank=RANK, markov_head_type="vanilla"),
    "dspark_gated": dict(markov_rank=RANK, markov_head_type="gated"),
    "dspark_rnn": dict(markov_rank=RANK, markov_head_type="rnn"),
    "dspark_bare": dict(markov_rank=0, enable_confidence_head=False),
}
LEAST = {"dspark": 0.5, "dspark_rnn": 0.45}


class Cache(DynamicCache):
    """``crop`` as it was when that code was written: to a length."""

    def crop(self, length):
        if length < self.get_seq_length():
            super().crop(length - self.get_seq_length())


def drafter_config(target, kind: dict) -> dict:
    common = dict(
        architectures=["Qwen3DSparkModel"],
        model_type="qwen3",
        head_dim=8,
        attention_bias=False,
        num_hidden_layers=2,
        num_target_layers=target.config.num_hidden_layers,
        layer_types=["full_attention"] * 2,
        tie_word_embeddings=False,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=LAYERS,
        num_anchors=8,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        rope_theta=10_000.0,
    )
    return SIZES | common | kind


def generated(model, target, prompt, least: float) -> dict:
    """What the authors' whole greedy generation drafts, proposes and accepts."""
    import deepspec.eval.base_evaluator as loop
    import deepspec.eval.dspark.evaluator as code

    loop.DynamicCache = code.DynamicCache = Cache
    rounds = dict(logits=[], chances=[], drafts=[])
    own = types.SimpleNamespace(
        draft_model=model,
        max_proposal_tokens=BLOCK,
        args=types.SimpleNamespace(temperature=0.0, confidence_threshold=least),
    )
    draw, chance = model.sample_draft_tokens, model.predict_confidence_step

    def drawing(base, **given):
        tokens, logits = draw(base, **given)
        root = given["first_prev_token_ids"]
        rounds["drafts"].append(torch.cat([root, tokens[0]]).numpy())
        rounds["logits"].append(logits[0].detach().numpy())
        return tokens, logits

    def trusting(*given, **named):
        said = chance(*given, **named)
        if said is not None:
            rounds["chances"].append(said[0].sigmoid().detach().numpy())
        return said

    model.sample_draft_tokens, model.predict_confidence_step = drawing, trusting
    evaluator = code.Qwen3DSparkEvaluator
    told = loop.generate_decoding_sample(
        target_model=target,
        input_ids=prompt[None],
        max_new_tokens=SAID,
        max_proposal_tokens=BLOCK,
        temperature=0.0,
        stop_token_ids=None,
        init_context=lambda **given: evaluator._init_context(own, **given),
        propose=lambda **given: evaluator._propose(own, **given),
        update=lambda *given: evaluator._update(own, *given),
    )
    del model.sample_draft_tokens, model.predict_confidence_step
    found = {name: np.stack(x) for name, x in rounds.items() if x}
    return found | dict(
        prompt=prompt.numpy(),
        text=told.output_ids[0].numpy(),
        proposed=told.proposal_lengths,
        accepted=told.accepted_draft_lengths,
        least=[least],
    )


def dspark(name: str, kind: dict, target, prompt, seeds) -> None:
    """The drafter, among some, of which most is accepted: else there would be little to see."""
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel

    config, best = drafter_config(target, kind), None
    own = Qwen3Config(**config, attn_implementation="eager")
    model = Qwen3DSparkModel(own).float().eval()
    tables = dict(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    for seed in seeds:
        rounded(model, seed)
        model.initialize_embeddings_and_head(**tables)
        told = generated(model, target, prompt, LEAST.get(name, 0.0))
        mean = np.mean(told["accepted"])
        if best is None or mean > best[0]:
            best = mean, {n: x.detach().clone() for n, x in model.state_dict().items()}, told
    mean, tensors, told = best
    print(f"{name}: {mean:.2f} accepted of {np.mean(told['proposed']):.2f} proposed a round")
    save(name, config, tensors, **told)


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    torch.set_num_threads(1)  # the models are tiny
    target = LlamaForCausalLM.from_pretrained(HERE / "target").float().eval()
    prompt = torch.randint(SIZES["vocab_size"], (7,), generator=torch.Generator().manual_seed(7))
    for name, kind in KINDS.items():
        dspark(name, kind, target, prompt, range(1, 13))


if __name__ == "__main__":
    main()
