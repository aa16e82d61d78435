"""Makes the golden files of DSpark drafters from SpecForge's own code.

    USE_JAX=0 python tests/golden/make_specforge.py SPECFORGE

takes a checkout of github.com/sgl-project/SpecForge, of which the drafters, their training and the
export are imported, and needs torch and transformers 5. ``features/dspark_specforge`` (whose first
layer has a window) holds a random drafter for ``features/target`` as ``export_to_hf`` writes it,
values in bfloat16; ``dspark_specforge_rnn`` one whose config the package then prepared for servers
(``normalize_dflash_export.py``). ``expected.npz`` has what those of ``make_dspark.py`` have.

The package's greedy generation reads other places of a block than its training teaches, and servers
read the latter. So the loop over rounds is ours: states of a block, corrected logits and chances
come from the code of the training, and its labels say which token each place drafts.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch
from feature_toys import HERE, MASK, SIZES, rounded, save
from make_block_heads import greedy
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

BLOCK, RANK, LAYERS = 4, 5, [1, 3, 5]
PACKAGES = ("", ".algorithms", ".algorithms.common", ".core", ".modeling", ".modeling.draft")
PACKAGES += (".export",)
KINDS = {  # keys of the config, those of its ``dflash_config``, whether it is prepared for servers
    "dspark_specforge": (
        dict(
            layer_types=["sliding_attention", "full_attention"],
            use_sliding_window=True,
            sliding_window=6,
        ),
        dict(markov_head_type="vanilla", confidence_head_with_markov=True),
        False,
    ),
    "dspark_specforge_rnn": (
        dict(layer_types=["full_attention"] * 2, use_sliding_window=False, sliding_window=None),
        dict(markov_head_type="rnn", confidence_head_with_markov=False),
        True,
    ),
}


def authors_modules(checkout: Path):
    """Their training, their loaders and their export, without what the packages import."""
    for name in (f"specforge{part}" for part in PACKAGES):
        sys.modules[name] = package = types.ModuleType(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
    import specforge.algorithms.common.dflash_family_model as training
    import specforge.export.to_hf as export
    import specforge.modeling.auto as auto
    import specforge.modeling.draft.dspark  # noqa: F401  (registers the class)

    path = checkout / "scripts" / "gates" / "normalize_dflash_export.py"
    spec = importlib.util.spec_from_file_location("normalize", path)
    assert spec is not None and spec.loader is not None
    normalize = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(normalize)
    return training, auto, export, normalize


def drafter_config(target, flat: dict, own: dict) -> dict:
    """As the package's ``configs/qwen3-4b-dspark.json``."""
    common = dict(
        architectures=["DSparkDraftModel"],
        auto_map={"AutoModel": "dspark.DSparkDraftModel"},
        model_type="qwen3",
        attention_bias=False,
        block_size=BLOCK,
        dtype="bfloat16",
        head_dim=8,
        num_hidden_layers=2,
        num_target_layers=target.config.num_hidden_layers,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        dflash_config=dict(
            attention_mode="gqa",
            mask_token_id=MASK,
            target_layer_ids=LAYERS,
            projector_type="dspark",
            markov_rank=RANK,
            confidence_head_alpha=1.0,
            enable_confidence_head=True,
        )
        | own,
    )
    return SIZES | common | flat


@torch.no_grad()
def generated(whole, target, prompt) -> dict:
    """What a greedy generation drafts, how sure it is, and how much of it is accepted."""
    model, text = whole.draft_model, torch.tensor(greedy(target, prompt))
    states = target(text[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in LAYERS], dim=-1)
    rounds = dict(logits=[], chances=[], drafts=[], proposed=[], accepted=[])
    where, given = len(prompt), dict(input_ids=text[None], loss_mask=torch.ones(1, len(text)))
    while where + BLOCK < len(text):
        anchors = torch.tensor([[where]]), torch.ones(1, 1, dtype=torch.bool)
        whole._sample_anchor_positions = lambda *_, found=anchors: found
        *_, hidden = whole._forward_draft_blocks(hidden_states=features, **given)
        base, root = whole.lm_head(hidden), text[where : where + 1]
        tokens, _ = model.markov_head.sample_block_tokens(
            base, first_prev_token_ids=root, hidden_states=hidden
        )
        drawn = torch.cat([root, tokens[0]])
        seen = dict(prev_token_ids=drawn[None, None, :-1], hidden_states=hidden[:, None])
        said = model.apply_logits_head(base[:, None], **seen)
        labels = whole._build_dspark_labels_and_mask(
            anchor_positions=anchors[0], block_keep_mask=anchors[1], **given
        )[0]
        rounds["logits"].append(said[0, 0].numpy())
        rounds["chances"].append(model.predict_confidence(**seen)[0, 0].sigmoid().numpy())
        rounds["drafts"].append(drawn.numpy())
        rounds["proposed"].append(BLOCK)
        rounds["accepted"].append(int((tokens[0] == labels[0, 0]).cumprod(0).sum()))
        where += rounds["accepted"][-1] + 1
    found = {name: np.stack(x) for name, x in rounds.items()}
    return found | dict(prompt=prompt.numpy(), text=text[: where + 1].numpy(), least=[0.0])


def main() -> None:
    training, auto, export, normalize = authors_modules(Path(sys.argv[1]))
    torch.set_num_threads(1)  # the models are tiny
    target = LlamaForCausalLM.from_pretrained(HERE / "target").float().eval()
    prompt = torch.randint(SIZES["vocab_size"], (7,), generator=torch.Generator().manual_seed(7))
    for name, (flat, own, prepared) in KINDS.items():
        with tempfile.TemporaryDirectory() as place:
            said, state, out = (Path(place) / x for x in ("said.json", "training_state.pt", "out"))
            said.write_text(json.dumps(drafter_config(target, flat, own)))
            config = auto.AutoDraftModelConfig.from_file(str(said))
            config._attn_implementation = "eager"
            model, best = auto.AutoDraftModel.from_config(config), None
            whole = training.OnlineDSparkModel(
                draft_model=model,
                target_lm_head=target.lm_head,
                target_embed_tokens=target.model.embed_tokens,
                mask_token_id=MASK,
                block_size=BLOCK,
                attention_backend="eager",
            )
            for seed in range(1, 161):
                rounded(model, seed)
                told = generated(whole, target, prompt)
                mean = np.mean(told["accepted"])
                if best is None or mean > best[0]:
                    best = mean, {n: x.clone() for n, x in model.state_dict().items()}, told
            mean, tensors, told = best
            print(f"{name}: {mean:.2f} accepted a round")
            torch.save(dict(draft_state_dict=tensors, strategy="dspark"), state)
            export.export_to_hf(str(state), str(said), str(out))
            if prepared:
                normalize.normalize_export(str(out / "config.json"), BLOCK)
            config = json.loads((out / "config.json").read_text())
            save(name, config, load_file(out / "model.safetensors"), **told)


if __name__ == "__main__":
    main()
