"""The model card of an export, ``README.md``: what the hub shows, and who loads the weights asks.

Figures come from ``measured.json``; what was not measured or not stated is said to be so.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import specjax
from specjax.models.lm import EMBEDDED

DRAFT = "a draft model in Hugging Face layout"
TARGET = "a language model in Hugging Face layout"
# Layouts that other servers read, and what each calls the method, as their documentation has it.
VLLM = {"medusa-vllm": "medusa", "eagle": "eagle", "eagle3": "eagle3", "dflash": "dflash"}
VLLM |= {"eagle3-speculators": "eagle3", DRAFT: "draft_model"}
ONE_EACH = ("medusa", "dflash")  # that draft no more tokens than `num_heads`; the others go on
ABOUT = ("recipe", "card.", "report.", "run.folder", "run.metrics")  # fields that change no weight
WITHIN = "distill."  # the section of recipes that train by another one
# What is read besides data.corpus, or in its place.
OTHER_TEXT = ("features", "init", "data.samples", "on_policy", "text")
SGLANG = {"eagle-sglang": "EAGLE", "eagle3": "EAGLE3", "dflash": "DFLASH", DRAFT: "STANDALONE"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardConfig:
    """What only you can say of an export. ``license``: of the weights, as the hub names it
    (``apache-2.0``). ``data``: what the texts are. ``data_license``: of these. ``name``: of the
    model, ``owner/name`` where it is to be uploaded."""

    name: str = ""
    license: str = ""
    data: str = ""
    data_license: str = ""


@dataclasses.dataclass(frozen=True)
class Export:
    """What a card is about.

    Attributes:
      folder: of the weights. ``layout``: a key of ``specjax.checkpoints.FORMATS``, ``DRAFT`` or
        ``TARGET``. ``kind``: the drafter's name, or ``target``.
      settings: ``config.resolved``, the recipe's name included.
      target: name of the model it belongs to, and ``fingerprint`` of its weights; empty: none.
    """

    folder: Path
    layout: str
    kind: str
    settings: dict
    target: str = ""
    fingerprint: str = ""


def write(export: Export, config: CardConfig, facts: dict) -> Path:
    """Writes the card; ``facts``: see ``measured.py``, empty where nothing was measured."""
    path = export.folder / "README.md"
    parts = [_front(export, config), _about(export, config), _use(export, config)]
    parts += [_figures(facts), _data(export, config), _made(export), _limits(export)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def _front(export: Export, config: CardConfig) -> str:
    """The YAML that the hub reads."""
    from huggingface_hub import ModelCardData

    known = {"license": config.license or None}
    if export.target.count("/") == 1 and not Path(export.target).exists():  # a name on the hub
        known["base_model"] = export.target
    tags = ["specjax", "jax"] + ["speculative-decoding", export.kind] * bool(export.target)
    front = ModelCardData(
        library_name="specjax" if export.target else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
        **known,
    )
    return f"---\n{front.to_yaml().strip()}\n---"


def _setting(export: Export, name: str):
    """A field of the recipe, or of the recipe ``distill`` within it; None where it has none."""
    return export.settings.get(name, export.settings.get(f"{WITHIN}{name}"))


def _about(export: Export, config: CardConfig) -> str:
    name = config.name.rpartition("/")[2] or Path(_setting(export, "run.folder")).name
    if not export.target:
        recipe = export.settings["recipe"]
        return f"# {name}\n\n{TARGET[0].upper()}{TARGET[1:]}, by the recipe `{recipe}` of specjax."
    return (
        f"# {name}\n\nA drafter (`{export.kind}`) for speculative decoding with `{export.target}`: "
        "it proposes tokens, the target checks each, and its texts stay what they are without. "
        f"Weights in bfloat16; layout: {export.layout}."
    )


def _use(export: Export, config: CardConfig) -> str:
    name, target = config.name or "THIS_FOLDER", export.target
    if not target:
        return f'## Use\n\n```py\nimport specjax\n\nlm = specjax.load("{name}")\n```'
    loaded = f'specjax.load("{name}", tokenizer=lm.tokenizer)'  # which it shares
    if export.layout != DRAFT:
        loaded = f'specjax.load_drafter("{name}", lm)'
    words = [
        "## Use",
        f'```py\nimport specjax\n\nlm = specjax.load("{target}")\ndrafter = {loaded}\n'
        'print(specjax.generate(lm, "...", drafter=drafter).text)\n```',
    ]
    known = target not in EMBEDDED  # what is part of this package no server can load by name
    if known and (method := VLLM.get(export.layout)):
        heads = _setting(export, "num_heads") if method in ONE_EACH else None
        facts = {"method": method, "model": name, "num_speculative_tokens": min(3, heads or 3)}
        command = f"vllm serve {target} --speculative-config '{json.dumps(facts)}'"
        words.append(f"vLLM reads this layout:\n\n```sh\n{command}\n```")
    if known and (method := SGLANG.get(export.layout)):
        command = f"python -m sglang.launch_server --model-path {target} \\\n"
        command += f"    --speculative-algorithm {method} --speculative-draft-model-path {name}"
        words.append(f"SGLang reads this layout:\n\n```sh\n{command}\n```")
    if len(words) > 2:
        words.append("Neither server was run on these files; look at the acceptance it reports.")
    elif export.layout == "mtp":
        words.append(
            "For vLLM and SGLang the modules have to lie in their target's own checkpoint: "
            "`specjax.save_drafter(drafter.drafter, drafter.params, TARGET_FOLDER, target=lm)`."
        )
    return "\n\n".join(words)


def _figures(facts: dict) -> str:
    """Tau by domain and the predicted speed-up."""
    domains, plan = facts.get("domains") or {}, facts.get("plan")
    if not domains:
        return "## Measured\n\nNot measured."
    lines = ["| held-out prompts | number | tau | 95 % | rounds that kept draft 1, 2, ... |"]
    lines += ["|---|---|---|---|---|"]
    for name, d in domains.items():
        kept = ", ".join(f"{share:.0%}" for share in d["kept"])
        row = f"| {name} | {d['prompts']} | {d['tau']:.2f} | {d['low']:.2f} to {d['high']:.2f} "
        lines.append(f"{row}| {kept} |")
    words = (
        f"Tau: tokens a pass of the target, bonus included; greedy, {facts['drafter']['num_draft']}"
        f" tokens drafted a round, {facts['new_tokens']} new tokens a prompt, by these weights."
    )
    speed = "Speed-up: not predicted."
    if plan:
        speed = f"Predicted by `specjax plan` on {facts['machine']}, batch 1: {plan['verdict']}."
    return "\n\n".join(["## Measured", "\n".join(lines), words, speed])


def _data(export: Export, config: CardConfig) -> str:
    others = {name: _setting(export, name) for name in OTHER_TEXT}
    others = [f"`{name} = {json.dumps(value)}`" for name, value in others.items() if value]
    said, licence = "Not stated by who trained it.", "not stated"
    if others:
        said = f"Not stated by who trained it; it read {', '.join(others)}."
    elif _setting(export, "data.corpus") == "stdlib":
        said, licence = "The source files of Python's standard library.", "PSF-2.0"
        if list(_setting(export, "data.mixed") or ()) == ["packages"]:
            said += " Files of published packages under permissive licences, as `packages.json` has"
            said, licence = f"{said} them.", "PSF-2.0, and of each package its own"
        elif _setting(export, "data.mixed"):
            mixed = json.dumps(_setting(export, "data.mixed"))
            said, licence = f"{said} Mixed into them: `{mixed}`.", "not stated"
    if config.data:
        said, licence = config.data, "not stated"
    words = f"## Data\n\n{said} Licence of the data: {config.data_license or licence}."
    share = sum(_setting(export, "data.samples_share") or ())
    if share and not _setting(export, "features"):  # whose rows are read in place of these
        words += f" {share:.0%} of the rows were written by the target itself."
    return words


def _made(export: Export) -> str:
    fields = "\n".join(
        f"{name} = {json.dumps(value)}"
        for name, value in export.settings.items()
        if not name.removeprefix(WITHIN).startswith(ABOUT) and value is not None
    )
    command = f"`specjax train {export.settings['recipe']}` (specjax {specjax.__version__})"
    return f"## Recipe\n\n{command}, with the configuration\n\n```toml\n{fields}\n```"


def _limits(export: Export) -> str:
    length = _setting(export, "data.length")
    if length is None:  # it has learned from what it served
        length = _setting(export, "prompt_tokens") + _setting(export, "new_tokens")
    words = f"## Limits\n\nTrained on rows of {length} tokens; beyond, it has no practice."
    if not export.target:
        return words + " It was not taught to follow instructions or to be safe."
    known = f" (fingerprint `{export.fingerprint}`)" if export.fingerprint else ""
    return (
        f"{words} It belongs to `{export.target}`{known}: with another target, texts stay that "
        "target's own, but fewer drafts are accepted. Greedy texts equal the target's token for "
        "token in float32; in bfloat16 near-ties may fall otherwise."
    )
