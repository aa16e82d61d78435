"""Writes the model card of an export, ``README.md``, in the form that the Hugging Face hub shows.

The figures come from ``measured.json``. The card says what was not measured and what was not
stated.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import specjax
from specjax.models.model_folder import EMBEDDED

DRAFT = "a draft model in Hugging Face layout"
TARGET = "a language model in Hugging Face layout"
# Layouts that other servers read, and the name of the method in each server's documentation.
VLLM = {"medusa-vllm": "medusa", "eagle": "eagle", "eagle3": "eagle3", "dflash": "dflash"}
VLLM |= {"eagle3-speculators": "eagle3", DRAFT: "draft_model"}
ONE_EACH = ("medusa", "dflash")  # these draft at most `num_heads` tokens; the others draft more
ABOUT = ("recipe", "card.", "report.", "run.folder", "run.metrics")  # fields that change no weight
WITHIN = "distill."  # the section of recipes that train by another one
# The fields that name text besides data.corpus, or in its place.
OTHER_TEXT = ("features", "init", "data.samples", "on_policy", "text")
SGLANG = {"eagle-sglang": "EAGLE", "eagle3": "EAGLE3", "dflash": "DFLASH", DRAFT: "STANDALONE"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardConfig:
    """The entries of the model card that the run cannot know."""

    name: str = ""  # of the exported model, "owner/name" where it is uploaded
    base_model: str = ""  # "owner/name" of the target, where it was loaded from a folder
    license: str = ""  # of the weights, as the Hugging Face hub names it: "apache-2.0"
    data: str = ""  # a description of the training text
    data_license: str = ""  # of the training text


@dataclasses.dataclass(frozen=True)
class Export:
    """The exported model that a card describes.

    Attributes:
      folder: the folder of the weights.
      layout: a key of ``specjax.checkpoints.FORMATS``, ``DRAFT`` or ``TARGET``.
      kind: the drafter's name, or ``target``.
      settings: ``config.resolved``, the recipe's name included.
      target: the name of the drafter's target; empty: the export is a target.
      fingerprint: the fingerprint of that target's weights; empty: there is none.
      served: whether other programs read the export, where they read its layout.
    """

    folder: Path
    layout: str
    kind: str
    settings: dict
    target: str = ""
    fingerprint: str = ""
    served: bool = True


def write(export: Export, config: CardConfig, facts: dict) -> Path:
    """Writes the card; ``facts`` (see ``measured.py``) is empty if nothing was measured."""
    path = export.folder / "README.md"
    name = base_model(export.target, config)
    export = dataclasses.replace(export, target=name, settings=_shortened(export.settings))
    parts = [_front(export, config), _about(export, config), _use(export, config)]
    parts += [_figures(facts), _data(export, config), _made(export), _limits(export)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def base_model(target: str, config: CardConfig) -> str:
    """The name of the target, without the folders of this machine that it lies in.

    The name is ``card.base_model`` where that is given; for a folder, the name on the hub that its
    ``config.json`` or the cache of the hub states, else the last part of its path.
    """
    if config.base_model or not target:
        return config.base_model
    path = Path(target).expanduser()
    if not path.is_dir():
        return target
    for part in path.absolute().parts:
        if part.startswith("models--"):  # the hub's cache: models--owner--name/snapshots/...
            return part.removeprefix("models--").replace("--", "/")
    file = path / "config.json"
    stated = json.loads(file.read_text()).get("_name_or_path") if file.is_file() else None
    if isinstance(stated, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", stated):
        if not Path(stated).exists():
            return stated
    return path.absolute().name


def _shortened(value):
    """Returns a setting, or several, with absolute paths cut to their last part."""
    if isinstance(value, dict):
        return {name: _shortened(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(one) for one in value]
    absolute = isinstance(value, str) and Path(value).expanduser().is_absolute()
    return Path(value).name if absolute else value


def _front(export: Export, config: CardConfig) -> str:
    """The YAML that the hub reads."""
    from huggingface_hub import ModelCardData

    known = {"license": config.license or None}
    if export.target and export.target not in EMBEDDED:
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
    """Returns a field of the recipe or of the recipe ``distill`` within it; None: there is none."""
    return export.settings.get(name, export.settings.get(f"{WITHIN}{name}"))


def _about(export: Export, config: CardConfig) -> str:
    name = config.name.rpartition("/")[2] or Path(_setting(export, "run.folder")).name
    if not export.target:
        recipe = export.settings["recipe"]
        return f"# {name}\n\n{TARGET[0].upper()}{TARGET[1:]}, by the recipe `{recipe}` of specjax."
    return (
        f"# {name}\n\nA drafter (`{export.kind}`) for speculative decoding with the target "
        f"`{export.target}`. The drafter proposes tokens and the target verifies them, so that the "
        "output follows the target's own distribution. The weights are in bfloat16; their layout "
        f"is {export.layout}."
    )


def _use(export: Export, config: CardConfig) -> str:
    name, target = config.name or "THIS_FOLDER", export.target
    if target and "/" not in target and target not in EMBEDDED:  # the name of a local folder
        target = f"PATH_TO/{target}"
    if not target:
        return f'## Use\n\n```py\nimport specjax\n\nlm = specjax.load("{name}")\n```'
    loaded = f'specjax.load("{name}", tokenizer=lm.tokenizer)'  # target and drafter share it
    if export.layout != DRAFT:
        loaded = f'specjax.load_drafter("{name}", lm)'
    words = [
        "## Use",
        f'```py\nimport specjax\n\nlm = specjax.load("{target}")\ndrafter = {loaded}\n'
        'print(specjax.generate(lm, "...", drafter=drafter).text)\n```',
    ]
    # servers cannot load models of this package by name
    known = export.served and target not in EMBEDDED
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
        words.append(
            "Neither server was run on these files. Check the acceptance rate that it reports."
        )
    elif export.layout == "mtp":
        words.append(
            "For vLLM and SGLang the modules have to lie in their target's own checkpoint: "
            "`specjax.save_drafter(drafter.drafter, drafter.params, TARGET_FOLDER, target=lm)`."
        )
    return "\n\n".join(words)


def _figures(facts: dict) -> str:
    """The table of τ by domain, and the predicted speed-up."""
    domains, plan = facts.get("domains") or {}, facts.get("plan")
    if not domains:
        return "## Measured\n\nNot measured."
    lines = ["| held-out prompts | number | τ | 95 % | rounds that accepted draft 1, 2, ... |"]
    lines += ["|---|---|---|---|---|"]
    for name, d in domains.items():
        kept = ", ".join(f"{share:.0%}" for share in d["kept"])
        row = f"| {name} | {d['prompts']} | {d['tau']:.2f} | {d['low']:.2f} to {d['high']:.2f} "
        lines.append(f"{row}| {kept} |")
    words = (
        "τ is the number of tokens emitted per round, the bonus token included. These "
        f"weights drafted {facts['drafter']['num_draft']} tokens per round and decoded "
        f"{facts['new_tokens']} new tokens per prompt, greedily."
    )
    speed = "Speed-up: not predicted."
    if plan:
        speed = f"Predicted by `specjax plan` on {facts['machine']}, batch 1: {_verdict(plan)}."
    return "\n\n".join(["## Measured", "\n".join(lines), words, speed])


def _verdict(plan: dict) -> str:
    """The planner's verdict; a drafter's folder is named by its last part."""
    chosen = (plan.get("choice") or {}).get("drafter", "")
    return plan["verdict"].replace(chosen, Path(chosen).name) if "/" in chosen else plan["verdict"]


def _corpus(name: str) -> str:
    """Describes ``data.corpus`` in words."""
    if name == "stdlib":
        return "The source files of Python's standard library."
    if name == "packages":
        return "Files of published packages under permissive licences, as `packages.json` has them."
    if name.startswith("hf:"):
        name, *parts = name.removeprefix("hf:").split(":")
        split = f", split `{parts[0]}`" if parts and parts[0] else ""
        return f"The data set `{name}` of the Hugging Face hub{split}."
    return f"The file or folder `{name}`, which its owner did not describe further."


def _data(export: Export, config: CardConfig) -> str:
    others = {name: _setting(export, name) for name in OTHER_TEXT}
    others = [f"`{name} = {json.dumps(value)}`" for name, value in others.items() if value]
    corpus, licence = _setting(export, "data.corpus"), "not stated"
    mixed = list(_setting(export, "data.mixed") or ())
    said = _corpus(corpus) if corpus else "Not stated by whoever trained it."
    if _setting(export, "features"):  # rows in place of the corpus's, whose text is not known here
        said = f"Not stated by whoever trained it. The run read {', '.join(others)}."
    elif others:
        said += f" The run also read {', '.join(others)}."
    elif mixed and not (corpus == "stdlib" and mixed == ["packages"]):
        said += f" Mixed into them: `{json.dumps(mixed)}`."
    elif corpus == "stdlib":
        licence = "PSF-2.0"
        if mixed:
            said += " " + _corpus(*mixed)
            licence += ", and of each package its own"
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
    if length is None:  # the recipe `online`, which has no data.length
        length = _setting(export, "prompt_tokens") + _setting(export, "new_tokens")
    words = f"## Limits\n\nThe model was trained on rows of {length} tokens and on no longer text."
    if not export.target:
        return words + " It was not trained to follow instructions or to be safe."
    known = f" (fingerprint `{export.fingerprint}`)" if export.fingerprint else ""
    return (
        f"{words} It belongs to the target `{export.target}`{known}. With another target, the "
        "output still follows that target, but fewer drafts are accepted. In float32, greedy "
        "output equals plain decoding token for token; in bfloat16, near-ties may be resolved "
        "differently."
    )
