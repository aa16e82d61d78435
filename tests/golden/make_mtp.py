"""Makes the golden files of MTP modules from the code of transformers 5.

    USE_JAX=0 python tests/golden/make_mtp.py [CASE ...]

needs torch and transformers 5.23 or later. Each folder of ``mtp`` holds a tiny random target with
its modules in one checkpoint, values in bfloat16, under the names that are published (which
transformers knows for DeepSeek's alone; the others are those that vLLM and SGLang read), and
``expected.npz``, computed in float32 by ``MtpModel`` from scratch in every round::

    tokens   int32 [T]        a prompt of PROMPT tokens and what is generated greedily after it
    lengths  int32 [R]        in each round: the tokens so far, the root counted
    drafts   int32 [R, K]     what the modules say of the next ones
    logits   float32 [R, K, V]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).parent / "mtp"
PROMPT, NEW, SEEDS = 7, 24, 40
COMMON = dict(
    vocab_size=48,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
PLAIN = COMMON | dict(num_key_value_heads=1, head_dim=12, mtp_layer_types=["full_attention"])
DEEPSEEK = COMMON | dict(
    num_key_value_heads=2,
    kv_lora_rank=12,
    q_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=8,
    moe_intermediate_size=12,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=2,
    topk_group=2,
    first_k_dense_replace=1,
)
CASES = {
    "deepseek": ("DeepseekV3", DEEPSEEK | dict(num_mtp_layers=2)),
    "mimo": ("Qwen2", PLAIN | dict(num_mtp_layers=1, mtp_hidden_states_first=True)),
    "qwen": ("Qwen3", PLAIN | dict(num_mtp_layers=1)),
}
# the modules' own names -> the published ones, after the prefix of a module
NAMES = {
    "deepseek": ("model.layers.{n}.", "model.layers.{n}.", {"post_norm": "shared_head.norm"}),
    "mimo": (
        "model.mtp_layers.{k}.",
        "model.mtp_layers.{k}.",
        {
            "enorm": "token_layernorm",
            "hnorm": "hidden_layernorm",
            "eh_proj": "input_proj",
            "post_norm": "final_layernorm",
        },
    ),
    "qwen": (
        "mtp.layers.{k}.",
        "mtp.",
        {
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "eh_proj": "fc",
            "post_norm": "norm",
        },
    ),
}


@torch.no_grad()
def rounded(module, seed: int):
    """``module`` with random weights that bfloat16 holds."""
    generator = torch.Generator().manual_seed(seed)
    both = [*module.named_parameters(), *module.named_buffers()]
    for name, x in both:
        if "inv_freq" in name:
            continue
        drawn = torch.randn(x.shape, generator=generator) * (0.3 if x.dim() > 1 else 0.1)
        x.copy_((drawn + ("norm" in name)).bfloat16().float())
    return module.float().eval()


@torch.no_grad()
def run(target, modules):
    """One greedy generation, round by round; nothing is kept from round to round."""
    tokens = torch.arange(3, 3 + PROMPT)[None] * 5 % COMMON["vocab_size"]
    rounds = []
    while tokens.shape[1] < PROMPT + NEW:
        length = tokens.shape[1]
        hidden = target.model(tokens[:, :-1]).last_hidden_state
        drafts, logits, _ = modules(
            input_ids=tokens[:, 1:],
            last_hidden_states=hidden,
            attention_mask=None,
            position_ids=torch.arange(1, length)[None],
            mtp_cache=MtpCache(config=modules.config),
        )
        rounds.append((length, drafts[0], logits[0]))
        said = target(torch.cat([tokens, drafts], dim=1)).logits.argmax(-1)[0, length - 1 :]
        same = (said[:-1] == drafts[0]).int().cumprod(0).sum()
        tokens = torch.cat([tokens, said[None, : same + 1]], dim=1)
    lengths, drafts, logits = zip(*rounds, strict=True)
    return dict(
        tokens=tokens[0].numpy().astype(np.int32),
        lengths=np.asarray(lengths, np.int32),
        drafts=torch.stack(drafts).numpy().astype(np.int32),
        logits=torch.stack(logits).numpy().astype(np.float32),
    )


def published(case: str, modules) -> dict[str, torch.Tensor]:
    """The modules' tensors under their published names."""
    layer, ends, names = NAMES[case]
    found = {}
    for name, x in modules.layers.state_dict().items():
        index, _, inner = name.partition(".")
        at = dict(k=int(index), n=COMMON["num_hidden_layers"] + int(index))
        if inner.startswith("mtp_block."):
            inner = inner.removeprefix("mtp_block.")
            for part, packed in unpacked(inner, x).items():
                found[layer.format(**at) + part] = packed
        else:
            own, _, leaf = inner.rpartition(".")
            found[f"{ends.format(**at)}{names.get(own, own)}.{leaf}"] = x
    return found


def unpacked(name: str, x) -> dict[str, torch.Tensor]:
    """Experts one by one, as files hold them; other tensors as they are."""
    if name.endswith(".experts.gate_up_proj"):
        base, pieces = name.replace("gate_up_proj", ""), {}
        for e, both in enumerate(x):
            gate, up = both.chunk(2)
            pieces |= {f"{base}{e}.gate_proj.weight": gate, f"{base}{e}.up_proj.weight": up}
        return pieces
    if name.endswith(".experts.down_proj"):
        base = name.replace("down_proj", "")
        return {f"{base}{e}.down_proj.weight": own for e, own in enumerate(x)}
    return {name: x}


def main() -> None:
    for case in sys.argv[1:] or CASES:
        kind, options = CASES[case]
        config = getattr(transformers, f"{kind}Config")(**options)
        best = None
        for seed in range(SEEDS):
            target = rounded(getattr(transformers, f"{kind}ForCausalLM")(config), seed)
            modules = MtpModel(target, config.num_mtp_layers)
            for layer in modules.layers:
                rounded(layer, 1000 + seed)
            modules.eval()
            found = run(target, modules)
            if best is None or len(found["lengths"]) < len(best[0]["lengths"]):
                best = found, target, modules
        found, target, modules = best
        folder = HERE / case
        target.to(torch.bfloat16).save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        own = {n: x.bfloat16().contiguous() for n, x in published(case, modules).items()}
        if case == "deepseek":  # as DeepSeek's files: they repeat the target's tables
            for n in range(2, 4):
                own[f"model.layers.{n}.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
                own[f"model.layers.{n}.shared_head.head.weight"] = weights["lm_head.weight"]
        own = {n: x.clone() for n, x in own.items()}
        save_file(weights | own, folder / "model.safetensors", metadata={"format": "pt"})
        said = json.loads((folder / "config.json").read_text())
        said = {key: x for key, x in said.items() if "mtp" not in key}
        said |= {"num_nextn_predict_layers": options["num_mtp_layers"], "dtype": "bfloat16"}
        if case == "mimo":
            said |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(folder / "expected.npz", **found)
        emitted = len(found["tokens"]) - PROMPT
        print(f"{case}: {emitted / len(found['lengths']):.2f} tokens a round", file=sys.stderr)


if __name__ == "__main__":
    main()
