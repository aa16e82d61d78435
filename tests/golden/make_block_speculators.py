"""Makes the golden files of block drafters from the code of vllm-project/speculators.

    USE_JAX=0 python tests/golden/make_block_speculators.py SPECULATORS

takes a folder that holds the package ``speculators`` of release 0.9.0 (its wheel, unpacked), and
needs torch, pydantic and transformers 5. Each of the folders of ``KINDS`` holds a random drafter
for ``features/target``, as ``save_pretrained`` of that package writes it, values in bfloat16, and
``expected.npz``, computed in float32 by a greedy generation, with the arrays that
``make_block_heads.py`` describes: ``logits`` are over the draft vocabulary where there is one, and
``chances`` float32 ``[R, K]`` are those of the confidence head.

The package trains drafters and does not generate. Block layers, LM head, heads, and the recurrence
of XPress's passes are its own; the loop over rounds is written here, and gives each place the token
before it as the package does in training.

In ``dflash_speculators_window`` one of two layers has a window, in which places see only places
before them, in ``dflash2_speculators_window`` both have one and see both ways. The package, which
trains, counts the window of all places from the root; here it is counted from each place, as in
z-lab's code (``windowed``).
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from feature_toys import HERE, KEPT, MASK, SIZES, rounded, save, vocabulary_map
from make_block_heads import BLOCK, greedy
from safetensors.torch import load_file
from speculators_drafters import models_alone
from transformers import LlamaForCausalLM

STATES = [1, 3, 6]
FEW = dict(draft_vocab_size=len(KEPT))
WINDOW = dict(use_sliding_window=True, sliding_window=6)
CONV = dict(conv_group_size=4, selector_rank=5, selector_top_k=4)
KINDS = {  # the kind of drafter, the options of its config
    "dflash_speculators": ("DFlash", FEW),
    "dspark_speculators": ("DSpark", FEW | dict(markov_rank=5)),
    "dspark_speculators_gated": (
        "DSpark",
        dict(markov_rank=5, markov_head_type="gated", sample_from_anchor=False),
    ),
    "dspark_speculators_rnn": (
        "DSpark",
        dict(markov_rank=5, markov_head_type="rnn", confidence_head_with_markov=False),
    ),
    "dflash2_speculators": ("DFlash2", CONV),
    "dflash_speculators_window": (
        "DFlash",
        FEW | dict(layers=WINDOW | dict(layer_types=["sliding_attention", "full_attention"])),
    ),
    "dflash2_speculators_window": (
        "DFlash2",
        CONV | dict(layers=WINDOW | dict(layer_types=["sliding_attention"] * 2)),
    ),
    "xpress_speculators": ("XPress", dict(xpress_rank=5, num_jacobi_passes=2)),
}


def made(kind: str, options: dict):
    """A drafter of the package."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    package = f"speculators.models.{kind.lower()}"
    config = getattr(importlib.import_module(f"{package}.config"), f"{kind}SpeculatorConfig")
    model = getattr(importlib.import_module(f"{package}.core"), f"{kind}DraftModel")
    layers = options.get("layers", {})
    options = {name: value for name, value in options.items() if name != "layers"}
    shape = SIZES | dict(model_type="qwen3", num_hidden_layers=2, head_dim=8) | layers
    told = SpeculatorsConfig(
        algorithm=kind.lower(),
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    own = config(
        transformer_layer_config=dict(shape, rope_parameters=dict(rope_theta=5e3)),
        block_size=BLOCK,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=STATES,
        speculators_config=told,
        **dict(draft_vocab_size=SIZES["vocab_size"]) | options,
    )
    own.transformer_layer_config._attn_implementation = "sdpa"
    return model(own).float().eval()


@torch.no_grad()
def filled(model, target, seed: int) -> None:
    """Random weights, and the tables of the target."""
    rounded(model, seed)
    model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    head = target.lm_head.weight
    if model.use_draft_vocab:
        for name, x in vocabulary_map(SIZES["vocab_size"]).items():
            getattr(model, name).copy_(x)
        head = head[KEPT]
    model.lm_head.weight.copy_(head)
    model.verifier_lm_head.weight.copy_(head)


def windowed(code) -> None:
    """Counts windows from each place of a block, in the masks that the package makes."""
    made = code.create_anchor_block_mask_mod

    def from_places(*args, sliding_window=None, **settings):
        mask, places, entries = made(*args, sliding_window=sliding_window, **settings)
        if sliding_window is None:
            return mask, places, entries
        root, length = int(settings["anchor_positions"][0]), settings["total_seq_len"]

        def near(b, h, place, entry):
            in_text = entry < length
            return mask(b, h, place, entry) & (~in_text | (entry > root + place - sliding_window))

        return near, places, entries

    code.create_anchor_block_mask_mod = from_places


def block_of(model, features, text, root: int):
    """The states ``[1, B, H]`` of the block at a place of the text, and their logits."""
    import speculators.models.dflash.core as code

    code.select_anchors = lambda *_: (torch.tensor([root]), torch.tensor([True]))
    hidden, logits, *_ = model._backbone_forward(
        features,
        text[None],
        torch.ones_like(text[None]),
        torch.zeros(1, len(text), SIZES["hidden_size"]),  # what the loss alone looks at
        torch.zeros_like(text[None]),
        max_anchors=1,
    )
    return hidden, logits


def drafted(model, hidden, base, before: int, root: int) -> dict:
    """Drafted tokens, the root first, and what the places said of them."""
    first, chances = (0 if model.config.sample_from_anchor else 1), None

    def ids(words):
        return words if model.d2t is None else words + model.d2t[words]

    given = torch.full((1, BLOCK), root)  # to each place the token before its own
    head, kind = base, model.config.speculators_model_type
    if kind == "xpress":
        cached, guess = model.refiner_head.hidden_cache(hidden), base.argmax(dim=-1)
        for _ in range(model.config.num_jacobi_passes):
            guess[:, 0] = root
            given = torch.cat([torch.tensor([[before]]), guess[:, :-1]], dim=1)
            head = base + model.refiner_head.block_bias(given, hcache=cached)
            guess = head.argmax(dim=-1)
    for place in range(first, BLOCK):
        if kind == "dspark":
            embedded = model.markov_head.prev_embeddings(given)
            named = dict(prev_token_ids=given, hidden_states=hidden, prev_emb=embedded)
            head = base + model.markov_head.block_bias(**named)
            read = [hidden] + [embedded] * model.config.confidence_head_with_markov
            chances = model.confidence_head(torch.cat(read, dim=-1)).sigmoid()
        elif kind == "dflash2":
            candidates, scores = model.candidate_selector.select(base, hidden, given)
            head = torch.full_like(base, -torch.inf).scatter(2, candidates, scores)
        if place + 1 < BLOCK and kind != "xpress":
            given[:, place + 1] = ids(head[0, place].argmax())
    tokens = ids(head[0, first:].argmax(dim=-1))
    said = dict(drafts=torch.cat([torch.tensor([root]), tokens]), logits=head[0, first:])
    return said if chances is None else said | dict(chances=chances[0, first:])


@torch.no_grad()
def generated(model, target, prompt) -> dict:
    """What a whole greedy generation drafts, and how much of it is accepted."""
    text = torch.as_tensor(greedy(target, prompt))
    states = target(text[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in STATES], dim=-1)
    where, rounds, accepted = len(prompt), [], []
    while where + BLOCK < len(text):
        hidden, base = block_of(model, features, text, where)
        before, root = int(text[where - 1]), int(text[where])
        said = drafted(model, hidden, base, before, root)
        own = said["drafts"][1:]
        same = own == text[where + 1 : where + 1 + len(own)]
        rounds.append(said)
        accepted.append(int(same.int().cumprod(dim=0).sum()))
        where += accepted[-1] + 1
    found = {key: np.stack([x[key].numpy() for x in rounds]) for key in rounds[0]}
    if "chances" in found:
        found["least"] = [0.0]
    return found | dict(prompt=prompt.numpy(), text=text[: where + 1].numpy(), accepted=accepted)


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    models_alone()
    windowed(importlib.import_module("speculators.models.dflash.core"))
    torch.set_num_threads(1)  # the models are tiny
    target = LlamaForCausalLM.from_pretrained(HERE / "target").float().eval()
    prompt = torch.randint(SIZES["vocab_size"], (7,), generator=torch.Generator().manual_seed(7))
    for name, (kind, options) in KINDS.items():
        model, best = made(kind, options), None
        for seed in range(1, 41):
            filled(model, target, seed)
            told = generated(model, target, prompt)
            if best is None or np.mean(told["accepted"]) > best[0]:
                best = np.mean(told["accepted"]), seed, told
        mean, seed, told = best
        filled(model, target, seed)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            written = json.loads((Path(folder) / "config.json").read_text())
            tensors = load_file(Path(folder) / "model.safetensors")
        print(f"{name}: {mean:.2f} accepted a round")
        save(name, written, tensors, **told)


if __name__ == "__main__":
    main()
