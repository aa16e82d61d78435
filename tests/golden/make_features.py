"""Makes the golden files of EAGLE, EAGLE-3 and DFlash drafters from their authors' own code.

    USE_JAX=0 python tests/golden/make_features.py EAGLE SPECULATORS DFLASH

takes checkouts of github.com/SafeAILab/EAGLE, github.com/vllm-project/speculators and
github.com/z-lab/dflash, and needs torch and transformers 5. ``features/target`` is a tiny random
Llama; each of the other folders holds a random drafter in its authors' layout, values in bfloat16,
and ``expected.npz``, computed in float32 by the official code around that Llama. Of ``eagle``,
``eagle_bare``, ``eagle3``, ``eagle3_wide`` (a whole greedy generation, R rounds):

    prompt    int32 [T]        text     int32 [L]      prompt and what was said after it
    logits    float32 [R, Vd]  the drafter's below each round's root
    drafts    int32 [R, N]     tokens, node 0 the root
    parents   int32 [R, N]     accepted int32 [R]      drafted tokens that were accepted
    shape     int32 [3]        width, depth and nodes of the tree

of ``dflash`` the same with chains, ``logits [R, N - 1, V]`` and without ``parents`` and ``shape``;
of ``speculators`` and ``speculators_norms`` (training-time test, true tokens given):

    tokens    int32 [T]        logits   float32 [S, T - 1, Vd] of step s for pair i: about the
                               token after i + 1 + s, of pairs for which that stands in the text

and of ``peagle`` the same from one pass (parallel prediction), zeros where that does not stand.
These three also have ``generated.npz``, a whole greedy generation as that of ``dflash``, whose
``logits`` are over the draft vocabulary: the package trains and does not generate, so the loop over
rounds is ours, and each drafted token comes from a step of its training.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import torch
from feature_toys import KEPT, MASK, SIZES, rounded, save, vocabulary_map
from safetensors.torch import save_file
from speculators_drafters import models_alone, peagle, speculators
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

WIDTH, DEPTH, NODES, SAID = 4, 3, 10, 32
LENGTH, BLOCK = 12, 5
TARGET = SIZES | dict(num_hidden_layers=7, tie_word_embeddings=False)

# ------------------------------------------------------------------------------ EAGLE, EAGLE-3


def eagle_model(reference: LlamaForCausalLM, three: bool, **changes):
    """The authors' ``EaModel`` around ``reference``, random; and the config of its drafter."""
    import eagle.model.ea_model as code
    from eagle.model.configs import EConfig

    def own_config(**values):
        config = EConfig(**values)
        config.rope_scaling, config.rope_theta = None, 10_000.0
        return config

    stub = types.SimpleNamespace(eos_token_id=-1)
    code.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *_, **__: stub)
    target = code.KVLlamaForCausalLM(own_config(**TARGET)).float().eval()
    target.load_state_dict(reference.state_dict(), strict=False)
    config = SIZES | dict(num_hidden_layers=1, model_type="llama") | changes
    with tempfile.TemporaryDirectory() as folder:
        table = {"model.embed_tokens.weight": reference.model.embed_tokens.weight.detach().clone()}
        save_file(table, Path(folder) / "model.safetensors")
        index = {"weight_map": dict.fromkeys(table, "model.safetensors")}
        (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
        (Path(folder) / "config.json").write_text(json.dumps(config))
        read, EConfig.from_pretrained = EConfig.from_pretrained, lambda _: own_config(**config)
        try:
            path = str(Path(folder) / "config.json")
            made = (NODES + 1, DEPTH - 1, WIDTH, 1.0)
            return code.EaModel(three, target, folder, path, *made, {}), config
        finally:
            EConfig.from_pretrained = read


def generated(model, prompt) -> dict:
    """What the authors' whole greedy generation drafts and accepts."""
    import eagle.model.ea_model as code
    import eagle.model.utils as steps

    rounds = dict(logits=[], drafts=[], parents=[], accepted=[])
    first, layer = [True], model.ea_layer
    draft, judge = layer.topK_genrate, steps.evaluate_posterior

    def drafting(*given, **named):
        first[0] = True
        tokens, retrieve, mask, positions = draft(*given, **named)
        sees = mask[0, 0].bool()
        above = sees & ~torch.eye(len(sees), dtype=torch.bool)
        deepest = torch.where(above, positions[None] + 1, 0).argmax(1)
        parents = torch.where(positions == 0, -1, deepest)
        rounds["drafts"].append(tokens[0].numpy())
        rounds["parents"].append(parents.numpy())
        return tokens, retrieve, mask, positions

    def logits(_, given):
        if first[0]:
            rounds["logits"].append(given[0][0].numpy())
        first[0] = False

    def judged(*given):
        best, count, law = judge(*given)
        rounds["accepted"].append(int(count))
        return best, count, law

    layer.topK_genrate, code.evaluate_posterior = drafting, judged
    hook = layer.logsoftmax.register_forward_pre_hook(logits)
    text = model.eagenerate(prompt[None], max_new_tokens=SAID, max_length=120)[0]
    hook.remove()
    del layer.topK_genrate
    code.evaluate_posterior = judge
    told = {name: np.stack(x)[: len(rounds["accepted"])] for name, x in rounds.items()}
    return told | dict(prompt=prompt.numpy(), text=text.numpy(), shape=[WIDTH, DEPTH, NODES])


def eagle(name: str, reference, prompt, seeds, three: bool, left_out=(), **changes) -> None:
    """The drafter, among some, of which most is accepted: else there would be little to catch up
    with. None that is all but certain of a token: there the authors' choice of nodes is a tie."""
    model, config = eagle_model(reference, three, **changes)
    layer = model.ea_layer
    table = layer.embed_tokens.weight.clone() if "target_hidden_size" not in config else None
    best = None
    for seed in seeds:
        rounded(layer, seed, 0.35 if three else 0.2)
        with torch.no_grad():
            if table is not None:
                layer.embed_tokens.weight.copy_(table)
        told = generated(model, prompt)
        sure = torch.tensor(told["logits"]).softmax(-1).max() > 0.98
        if not sure and (best is None or told["accepted"].mean() > best[0]):
            own = {n: x.detach().clone() for n, x in layer.state_dict().items()}
            best = told["accepted"].mean(), own, told
    print(f"{name}: {best[0]:.2f} tokens accepted a round, at most {max(best[2]['accepted'])}")
    tensors = {n: x for n, x in best[1].items() if n not in left_out}
    save(name, config, tensors, **best[2])


def draft_vocabulary(model_class):
    """The authors' EAGLE-3 with ``KEPT`` for its draft vocabulary."""
    made = model_class.__init__

    def init(self, config, *given, **named):
        made(self, config, *given, **named)
        if config.draft_vocab_size != config.vocab_size:
            for name, x in vocabulary_map(config.vocab_size).items():
                getattr(self, name).copy_(x)

    model_class.__init__ = init


# ------------------------------------------------------------------------------------- DFlash


def dflash(reference, prompt, seeds) -> None:
    import dflash.model as code

    class Cache(code.DynamicCache):
        """``crop`` as it was when that code was written: to a length."""

        def crop(self, length):
            if length < self.get_seq_length():
                super().crop(length - self.get_seq_length())

    code._cuda_time, code.DynamicCache = time.perf_counter, Cache
    config = SIZES | dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        head_dim=8,
        attention_bias=False,
        num_hidden_layers=2,
        num_target_layers=TARGET["num_hidden_layers"],
        layer_types=["full_attention"] * 2,
        block_size=BLOCK,
        dflash_config=dict(mask_token_id=MASK, target_layer_ids=[1, 3, 5]),
        rope_theta=10_000.0,
    )
    own = Qwen3Config(**config, attn_implementation="eager")
    model, best = code.DFlashDraftModel(own).float().eval(), None
    for seed in seeds:
        rounded(model, seed)
        logits = []

        def kept(_, __, hidden, logits=logits):
            logits.append(reference.lm_head(hidden[:, 1 - BLOCK :])[0].detach().numpy())

        hook = model.register_forward_hook(kept)
        told = code.dflash_generate(
            model, reference, prompt[None], SAID, None, 0.0, return_stats=True
        )
        hook.remove()
        accepted = np.asarray(told.acceptance_lengths) - 1
        if best is None or accepted.mean() > best[0]:
            tensors = {n: x.detach().clone() for n, x in model.state_dict().items()}
            best = accepted.mean(), tensors, told.output_ids[0].numpy(), np.stack(logits), accepted
    mean, tensors, text, logits, accepted = best
    print(f"dflash: {mean:.2f} tokens accepted a round, at most {max(accepted)}")
    starts = len(prompt) + np.cumsum([0, *(accepted[:-1] + 1)])
    roots = text[np.minimum(starts, len(text) - 1)]
    drafts = np.concatenate([roots[:, None], logits.argmax(-1)], axis=1)
    expected = dict(prompt=prompt, text=text, logits=logits, drafts=drafts, accepted=accepted)
    save("dflash", config, tensors, **expected)


def main() -> None:
    unused = types.SimpleNamespace(Qwen3ForCausalLM=None)  # made for transformers before 5
    sys.modules["eagle.model.modeling_qwen3_kv"] = unused
    sys.path[:0] = [sys.argv[1], str(Path(sys.argv[2]) / "src"), sys.argv[3]]
    torch.set_num_threads(1)  # the models are tiny
    reference = rounded(LlamaForCausalLM(LlamaConfig(**TARGET)), 0)
    save("target", reference.config.to_dict(), reference.state_dict())
    draws = torch.Generator().manual_seed(7)
    prompt = torch.randint(SIZES["vocab_size"], (7,), generator=draws)
    tokens = torch.randint(SIZES["vocab_size"], (LENGTH,), generator=draws)

    import eagle.model.cnets as three

    draft_vocabulary(three.Model)
    seeds = range(1, 13)
    eagle("eagle", reference, prompt, seeds, False)
    eagle("eagle_bare", reference, prompt, seeds, False, ["embed_tokens.weight"], bias=False)
    vocabulary = dict(draft_vocab_size=len(KEPT))
    eagle("eagle3", reference, prompt, seeds, True, ["embed_tokens.weight"], **vocabulary)
    wide = dict(draft_vocab_size=SIZES["vocab_size"], hidden_size=20, target_hidden_size=16)
    eagle("eagle3_wide", reference, prompt, seeds, True, **wide)
    dflash(reference, prompt, range(1, 25))
    models_alone()
    speculators("speculators", reference, tokens, 1, "llama", norm_before_residual=True)
    norms = dict(fc_norm=True, norm_output=True)
    speculators("speculators_norms", reference, tokens, 2, "qwen3", **norms)
    peagle(reference, tokens, 3)


if __name__ == "__main__":
    main()
