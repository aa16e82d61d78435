"""Makes the golden files of Medusa and Hydra heads from their authors' own code.

    USE_JAX=0 python tests/golden/make_heads.py MEDUSA HYDRA

takes checkouts of github.com/FasterDecoding/Medusa and github.com/zankner/Hydra, and needs torch
and transformers 4.34 to 4.36, which those are written for. ``heads/target`` is a tiny random Llama;
each of the other folders holds random heads in the authors' layout, values in bfloat16, and
``expected.npz``, computed in float32 by the official modules around that Llama:

    tokens  int32 [B, T]         a text, the same in all cases
    logits  float32 [K, B, T, V] of head k at each position, the true tokens given
    paths   int32 [N, D]         the tree drafted below, as paths of ranks, -1: after the end
    first   int32 [N + 1]        the draft after row 0's text; node 0 is the root
    second  int32 [N + 1]        the draft after two accepted tokens of the first
    fed     int32 [2]            these tokens: the root of the first draft and the one below it
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent / "heads"
HEADS, BATCH, LENGTH = 3, 2, 6
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
LLAMA = dict(
    vocab_size=72,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def rounded(module, seed: int):
    """``module`` with random weights, none of them zero, that bfloat16 holds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in module.named_parameters():
            drawn = torch.randn(x.shape, generator=generator) * (0.15 if x.dim() > 1 else 0.1)
            drawn = drawn + (1 if "norm" in name else 0)
            x.copy_(drawn.bfloat16().float())
    return module.float().eval()


def save(name: str, config: dict, tensors: dict, weights: str, **expected) -> None:
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {n: x.detach().bfloat16().clone() for n, x in tensors.items() if "inv_freq" not in n}
    save_file(tensors, folder / weights, metadata={"format": "pt"})
    if expected:
        depth = max(map(len, PATHS))
        paths = [[*path, *[-1] * (depth - len(path))] for path in PATHS]
        np.savez(folder / "expected.npz", paths=np.asarray(paths, np.int32), **expected)


def target_of(llama_class):
    """The target as that class; its weights are those of ``heads/target``."""
    model = rounded(LlamaForCausalLM(LlamaConfig(**LLAMA)), 0)
    own = llama_class(LlamaConfig(**LLAMA)).float().eval()
    own.load_state_dict(model.state_dict(), strict=False)
    return own


def without_tokenizer(module) -> None:
    stub = types.SimpleNamespace(pad_token_id=-1)
    module.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *_: stub)


@torch.no_grad()
def medusa(tokens, tied: bool) -> None:
    if tied:
        from medusa.model import medusa_model_legacy as code
    else:
        from medusa.model import medusa_model as code
    from medusa.model.kv_cache import initialize_past_key_values
    from medusa.model.utils import generate_candidates, generate_medusa_buffers

    without_tokenizer(code)
    if tied:
        model = code.MedusaModel(target_of(code.KVLlamaForCausalLM), HEADS, 1, "")
        call = model
    else:
        config = LlamaConfig(**LLAMA, medusa_num_heads=HEADS, medusa_num_layers=1)
        model = code.MedusaModelLlama(config).float().eval()
        model.load_state_dict(target_of(code.KVLlamaForCausalLM).state_dict(), strict=False)
        call = lambda *a, **k: model(*a, medusa_forward=True, **k)  # noqa: E731
    rounded(model.medusa_head, 1 + tied)
    logits = call(tokens)
    buffers = generate_medusa_buffers(PATHS, device="cpu")

    def draft(context):
        past, *_ = initialize_past_key_values(model.base_model)
        said, _, own = call(context, past_key_values=past, output_orig=True)
        given = buffers["tree_indices"], buffers["retrieve_indices"]
        return generate_candidates(said, own, *given, temperature=0)[1][0]

    first = draft(tokens[:1])
    fed = first[[0, 1]]
    second = draft(torch.cat([tokens[:1], fed[None]], dim=1))
    config = dict(medusa_num_heads=HEADS, medusa_num_layers=1, base_model_name_or_path="target")
    save(
        "medusa_tied" if tied else "medusa",
        config | (dict(version="2") if tied else {}),
        model.medusa_head.state_dict(),
        "medusa_lm_head.safetensors",
        **numbers(tokens, logits, first, second, fed),
    )


@torch.no_grad()
def hydra(tokens, kind: str, layers: int) -> None:
    from hydra.model import hydra_model as code
    from hydra.model.kv_cache import initialize_past_key_values
    from hydra.model.utils import generate_hydra_buffers

    without_tokenizer(code)
    config = dict(hydra_num_heads=HEADS, hydra_num_layers=layers, hydra_head_arch=kind)
    config |= dict(grounded_heads=True, hidden_state_offset=0, base_model_name_or_path="target")
    target = target_of(code.KVLlamaForCausalLM)
    model = code.HydraModel(target, HEADS, layers, kind, "", grounded_heads=True).eval()
    table = target.model.embed_tokens.weight.clone()
    rounded(model.hydra_head, 3 + layers)
    target.model.embed_tokens.weight.copy_(table)  # it is a part of the heads, too
    logits = model(tokens, run_hydra_head=True, base_hidden_states=hidden_of(target, tokens))[0]
    buffers = generate_hydra_buffers(PATHS, device="cpu")
    past, *_ = initialize_past_key_values(target, kind)

    def draft(context, since):
        said = target.lm_head(hidden_of(target, context))
        fresh = hidden_of(target, context)[:, since:]
        return model.hydra_head.proposal(said, fresh, buffers, past, context)[1][0]

    first = draft(tokens[:1], 0)
    fed = first[[0, 1]]
    second = draft(torch.cat([tokens[:1], fed[None]], dim=1), LENGTH)
    save(
        "hydra" if kind == "mlp" else "hydra_prefix",
        config,
        model.hydra_head.state_dict(),
        "hydra_lm_head.safetensors",
        **numbers(tokens, logits, first, second, fed),
    )


def hidden_of(target, tokens):
    return target.model(tokens)[0]


def numbers(tokens, logits, first, second, fed) -> dict:
    drafts = dict(tokens=tokens, first=first, second=second, fed=fed)
    drafts = {name: x.numpy().astype(np.int32) for name, x in drafts.items()}
    return drafts | dict(logits=logits.numpy().astype(np.float32))


def main() -> None:
    sys.path[:0] = sys.argv[1:3]
    tokens = torch.randint(LLAMA["vocab_size"], (BATCH, LENGTH), generator=torch.manual_seed(7))
    target = rounded(LlamaForCausalLM(LlamaConfig(**LLAMA)), 0)
    save("target", target.config.to_dict(), target.state_dict(), "model.safetensors")
    medusa(tokens, tied=False)
    medusa(tokens, tied=True)
    hydra(tokens, "mlp", 1)
    hydra(tokens, "prefix-mlp", 3)


if __name__ == "__main__":
    main()
