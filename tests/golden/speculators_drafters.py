"""Golden files from the code of github.com/vllm-project/speculators; see ``make_features.py``."""

from __future__ import annotations

import json
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch
from feature_toys import HERE, KEPT, MASK, SIZES, rounded, save, save_arrays, vocabulary_map

STEPS, SAID, PROMPTS = 3, 40, 12


def models_alone() -> None:
    """Lets speculators be imported without what only its training and its logs need."""
    from importlib import abc, machinery, metadata

    class Nothing(types.ModuleType):
        __path__ = []

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Nothing(name)

        def __call__(self, *_, **__):
            return self

        def __getitem__(self, _):
            return object

    class Missing(abc.MetaPathFinder, abc.Loader):
        unused = ("loguru", "datasets", "openai", "hs_connectors", "pydantic_settings")

        def find_spec(self, name, path=None, target=None):
            training = name.startswith(("speculators.train", "speculators.data_generation"))
            if training or name.partition(".")[0] in self.unused:
                return machinery.ModuleSpec(name, self, is_package=True)
            return None

        def create_module(self, spec):
            return Nothing(spec.name)

        def exec_module(self, module):
            pass

    sys.meta_path.insert(0, Missing())
    known = metadata.version
    metadata.version = lambda name: "0" if name == "speculators" else known(name)


@torch.no_grad()
def speculators(name: str, reference, tokens, seed: int, kind: str, **changes) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = speculators_config(Eagle3SpeculatorConfig, "eagle3", dict(model_type=kind), **changes)
    # "eager" adds to its scores a mask that, of later steps, holds truth values
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = speculators_model(Eagle3DraftModel, config, reference, seed)

    def say(tokens):
        steps = []
        hook = model.lm_head.register_forward_hook(lambda _, __, x: steps.append(x[0].numpy()))
        model(**read(reference, tokens), ttt_steps=STEPS)
        hook.remove()
        return np.stack(steps)

    speculators_save(name, model, tokens, say(tokens))
    generation_save(name, say, reference)


@torch.no_grad()
def peagle(reference, tokens, seed: int) -> None:
    """Takes all pairs, of which a training step would draw some at random."""
    import speculators.models.peagle.core as code
    from speculators.losses import resolve_loss_config

    layer = dict(model_type="llama", num_hidden_layers=2)
    own = dict(mask_token_id=MASK, norm_before_residual=True, fc_norm=True)
    config = speculators_config(code.PEagleSpeculatorConfig, "peagle", layer, **own)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = speculators_model(code.PEagleDraftModel, config, reference, seed)
    loss = resolve_loss_config("ce", "eager")

    def say(tokens):
        pairs, later = len(tokens) - 1, len(tokens) - STEPS
        sampled = [(i, s) for s in range(STEPS) for i in range(pairs if s == 0 else later)]
        anchors, depths = torch.tensor(sampled).T
        code.generate_cod_sample_indices = lambda **_: (anchors, depths)
        logits = np.zeros((STEPS, pairs, len(KEPT)), np.float32)

        def kept(_, __, out):
            logits[depths, anchors] = out[0].numpy()

        hook = model.lm_head.register_forward_hook(kept)
        last = torch.zeros(1, pairs, SIZES["hidden_size"])  # what the loss alone looks at
        given = dict(verifier_last_hidden_states=last, num_depths=STEPS, loss_config=loss)
        model(**read(reference, tokens), **given)
        hook.remove()
        return logits

    speculators_save("peagle", model, tokens, say(tokens))
    generation_save("peagle", say, reference)


def speculators_config(kind, algorithm: str, layer: dict, **changes):
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = SIZES | dict(num_hidden_layers=1, head_dim=8, attention_bias=False) | layer
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    told = SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=verifier,
    )
    return kind(
        transformer_layer_config=dict(layer, rope_parameters=dict(rope_theta=5e3)),
        draft_vocab_size=len(KEPT),
        speculators_config=told,
        eagle_aux_hidden_state_layer_ids=[1, 3, 6],
        **changes,
    )


def speculators_model(kind, config, reference, seed: int):
    """A random model with the target's embeddings."""
    model = rounded(kind(config), seed)
    model.embed_tokens.weight.copy_(reference.model.embed_tokens.weight)
    for buffer, x in vocabulary_map(SIZES["vocab_size"]).items():
        getattr(model, buffer).copy_(x)
    return model


def read(reference, tokens) -> dict:
    """What a model is to read of ``tokens``."""
    states = reference(tokens[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in (1, 3, 6)], dim=-1)
    return dict(
        hidden_states=features[:, :-1],
        input_ids=tokens[None, 1:],
        document_ids=torch.zeros(1, len(tokens) - 1, dtype=torch.long),
    )


def speculators_save(name: str, model, tokens, logits) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        written = json.loads((Path(folder) / "config.json").read_text())
    ignored = ("verifier_lm_head.weight", "verifier_norm.weight")
    tensors = {n: x for n, x in model.state_dict().items() if n not in ignored}
    save(name, written, tensors, tokens=tokens.numpy(), logits=logits)


def generation_save(name: str, say, reference) -> None:
    """The whole greedy generation, after one of some random prompts, of which most is accepted."""
    draws = torch.Generator().manual_seed(11)
    prompts = [torch.randint(SIZES["vocab_size"], (7,), generator=draws) for _ in range(PROMPTS)]
    found = [generation(say, reference, prompt) for prompt in prompts]
    told = max(found, key=lambda one: np.mean(one["accepted"]))
    accepted = told["accepted"]
    print(f"{name}: {np.mean(accepted):.2f} tokens accepted a round, at most {max(accepted)}")
    save_arrays(HERE / name / "generated.npz", **told)


def generation(say, reference, prompt) -> dict:
    """A whole greedy generation: each drafted token is the best one of a training step, which is
    given the text up to the root and the tokens drafted before; what stands after these is not
    seen, and is 0 here."""
    text, at = prompt, len(prompt)
    for _ in range(SAID):
        text = torch.cat([text, reference(text[None]).logits[0, -1:].argmax(dim=-1)])
    logits, drafts, accepted = [], [], []
    while at + STEPS < len(text):
        tokens = torch.cat([text[: at + 1], torch.zeros(STEPS, dtype=torch.long)])
        said = []
        for step in range(STEPS):
            said.append(say(tokens)[step, at - 1])
            tokens[at + 1 + step] = KEPT[int(said[-1].argmax())]
        drafts.append(tokens[at : at + 1 + STEPS].numpy())
        same = drafts[-1][1:] == text[at + 1 : at + 1 + STEPS].numpy()
        accepted.append(int(np.cumprod(same).sum()))
        logits.append(np.stack(said))
        at += accepted[-1] + 1
    told = dict(prompt=prompt.numpy(), text=text[: at + 1].numpy(), accepted=accepted)
    return told | dict(drafts=np.stack(drafts), logits=np.stack(logits))
