"""Makes the golden files of the recurrent drafters from their authors' own code.

    python tests/golden/make_recurrent.py FMS_EXTRAS ARCTIC_TRAINING ML_RECURRENT_DRAFTER

takes checkouts of github.com/foundation-model-stack/fms-extras, snowflakedb/ArcticTraining and
apple/ml-recurrent-drafter (and needs torch and transformers). One folder a case: a tiny random
checkpoint in the published layout, values in bfloat16, and ``expected.npz`` with what the official
module computes from it in float32:

    hidden  float32 [B, T, F]      the target's hidden states
    tokens  int32 [B, T + n]       ``tokens[:, t]`` is the token after ``hidden[:, t]``
    logits  float32 [n, B, T, V]   of head (or step) ``i``, about the token after ``tokens[t + i]``
    drafts  int32 [B, n]           drafted greedily from ``hidden[:, 0]`` and ``tokens[:, 0]``

and for ReDrafter ``embedding`` [V, F], the target's, and ``beams`` int32 [B, width, n] instead of
drafts; its logits are those after the top-50 filter of its beam search.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

SIZES = dict(vocab_size=72, n_predict=3)
BATCH, LENGTH, HIDDEN = 2, 5, 24
LSTM = dict(method="sum_lstm", inner_dim="16", proj_dim="16", emb_dim="16", tie_weights=True)
DRAFTER = dict(vocab_size=72, hidden_size=HIDDEN, num_lookback_tokens=4)
CASES = {
    "mlp": dict(emb_dim=HIDDEN, inner_dim=0),
    "mlp_tied": dict(emb_dim=HIDDEN, inner_dim=16, tie_weights=True, scale_input=True),
    "lstm": LSTM | dict(input_hidden_dim=HIDDEN, scale_input=True, tie_lstm_embs=True),
    "lstm_untied": LSTM | dict(input_hidden_dim=HIDDEN, scale_input=False, tie_lstm_embs=False),
    "redrafter": DRAFTER | dict(exit_dim=2 * HIDDEN, num_draft_layers=2, rnn=True),
    "redrafter_sum": DRAFTER | dict(exit_dim=32, num_draft_layers=1, rnn=False),
}


def module_at(path: Path, name: str):
    """A file of a checkout as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def without_packages(norm) -> None:
    """Stands in for the two packages that fms-extras only registers its models with; its norm is
    that of ArcticTraining, which took it over."""
    for name in ("fms", "fms.models", "fms.modules", "fms.modules.layernorm", "fms.utils"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["fms"].models = sys.modules["fms.models"]
    sys.modules["fms.models"].register_model = lambda *_: None
    sys.modules["fms.modules.layernorm"].LayerNormParameterized = norm
    registry = types.SimpleNamespace(register_adapter=lambda *_: None)
    sys.modules["fms.utils"].serialization = registry


def randomise(model, seed: int) -> None:
    """Every parameter random; at their usual ones and zeros a mistake in norms would not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            scale = "ln" in name and name.endswith("weight")
            size = 0.2 if value.ndim == 1 or "lm_head" in name else 0.5
            value.copy_((noise * size + float(scale)).bfloat16())


def save(folder: Path, config: dict, tensors: dict, **expected) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {k: v.bfloat16().contiguous().clone() for k, v in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    arrays = {k: np.asarray(v) for k, v in expected.items()}
    ints = {k: v.astype(np.int32) for k, v in arrays.items() if v.dtype == np.int64}
    np.savez_compressed(folder / "expected.npz", **(arrays | ints))


def speculator(model, config: dict, folder: Path, prefix: str, hidden, tokens) -> None:
    """A case of either speculator: ``model(hidden, tokens)`` is teacher-forced."""
    logits = model(hidden, tokens)
    row = tokens[:, :1]
    for i in range(model.n_predict):  # heads see the drafts before them
        spare = torch.zeros((len(row), model.n_predict - i), dtype=row.dtype)
        said = model(hidden[:, :1], torch.cat([row, spare], dim=1))[i, :, 0].argmax(-1)
        row = torch.cat([row, said[:, None]], dim=1)
    tensors = {prefix + name: value for name, value in model.state_dict().items()}
    if prefix:  # its files are written by transformers
        first = {}  # which writes a tensor that several modules share once
        for name, value in tensors.items():
            first.setdefault(value.data_ptr(), name)
        tensors = {name: tensors[name] for name in first.values()}
    save(folder, config, tensors, hidden=hidden, tokens=tokens, logits=logits, drafts=row[:, 1:])


def redrafter(theirs, model, config: dict, folder: Path, hidden, tokens, table) -> None:
    """Logits of three steps, teacher-forced, and the beams of a search 6 wide and 3 deep."""
    steps, state, logits = 3, torch.zeros_like(hidden), []
    for i in range(steps):
        entry = table(tokens[:, i : i + hidden.shape[1]])
        if model.config.rnn:
            state = torch.nn.functional.silu(model.rnn_w(entry) + model.rnn_u(state))
        else:
            state = state + entry
        logits.append(model.compute_logits(torch.cat([hidden, state], dim=-1)))
    shape = theirs.BeamShape(6, steps + 1)
    beams, _ = model.beam_search_candidates(hidden[:, 0], tokens[:, 0], table, shape)
    expected = dict(hidden=hidden, tokens=tokens, logits=torch.stack(logits))
    expected |= dict(beams=beams[:, :, 1:], embedding=table.weight)
    save(folder, config, model.state_dict(), **expected)


def main(fms_extras: Path, arctic_training: Path, recurrent_drafter: Path) -> None:
    project = arctic_training / "projects/arctic_lstm_speculator/speculator"
    arctic = module_at(project / "speculator.py", "arctic_speculator")
    arctic_configs = module_at(project / "configs.py", "arctic_configs")
    without_packages(arctic.LayerNormParameterized)
    fms = module_at(fms_extras / "fms_extras/models/speculator.py", "fms_speculator")
    sys.path.insert(0, str(recurrent_drafter))
    package = types.ModuleType("recurrent_drafting")  # its own imports the whole of a Llama
    package.__path__ = [str(recurrent_drafter / "recurrent_drafting")]
    sys.modules["recurrent_drafting"] = package
    from recurrent_drafting import configuration_drafter, modeling_drafter

    root = Path(__file__).parent / "recurrent"
    for seed, (case, options) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        hidden = torch.randn(BATCH, LENGTH, HIDDEN)
        tokens = torch.randint(SIZES["vocab_size"], (BATCH, LENGTH + SIZES["n_predict"]))
        if case.startswith("redrafter"):
            config = configuration_drafter.DrafterConfig(**options)
            model = modeling_drafter.Drafter(config).eval()
            randomise(model, seed)
            table = torch.nn.Embedding(SIZES["vocab_size"], HIDDEN)
            with torch.no_grad():
                redrafter(
                    modeling_drafter,
                    model,
                    config.to_diff_dict(),
                    root / case,
                    hidden,
                    tokens,
                    table,
                )
            continue
        if case.startswith("mlp"):
            config = SIZES | dict(tie_weights=False, scale_input=False) | options
            model = fms.MLPSpeculator(**config)
            shared = dict(top_k_tokens_per_head=[4, 3, 2], n_candidates=5)
            config |= shared | dict(model_type="mlp_speculator")
            config |= dict(architectures=["MLPSpeculatorPreTrainedModel"])
            prefix = "speculator."
        else:
            holder = arctic_configs.ArcticLSTMSpeculatorConfig("a target", **(SIZES | options))
            model, config, prefix = arctic.ArcticLSTMSpeculator(holder), vars(holder), ""
        randomise(model, seed)
        with torch.no_grad():
            speculator(model.eval(), config, root / case, prefix, hidden, tokens)


if __name__ == "__main__":
    main(*(Path(folder) for folder in sys.argv[1:4]))
