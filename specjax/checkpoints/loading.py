"""Reading a drafter from a folder or from the Hugging Face hub, whatever its layout."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path

import jax.numpy as jnp

from .. import kernels
from .._internal import callers
from ..drafters import registry
from ..drafters.heads import HeadDrafter
from ..models.files import read_json
from ..models.headers import INDEX
from ..models.lm import LM
from ..models.model_folder import fingerprint, folder_of, name_of
from ..models.seq2seq.encoder_inputs import encodes
from ..trees.grown import SETTINGS, Expand
from ..trees.topology import Topology, as_topology
from ..types import Drafter, HeadTarget, PyTree
from . import eagle, kangaroo, masks
from .formats import FORMATS
from .weights import PICKLES, Tensors, check_integers, check_numbers, listed

_HUB_FILES = ["config.json", "*.safetensors", INDEX, *PICKLES]
# keys that only the configs of heads have; EAGLE's and some others have none
_CONFIG_KEYS = ("medusa_", "hydra_", "dflash_", "specdec_", "eagle_")
_CONFIG_KEYS += ("specdiff_", "spire_", "draft_vocab_size", "speculators_", "markov_")
# what ``model_type`` is in the layouts whose keys have no such prefix
_OBJECTS = (  # keys whose values are objects in all layouts
    "dflash_config",
    "eagle_config",
    "specdiff_config",
    "specjax",
    "speculators_config",
    "transformer_layer_config",
)
_MODEL_TYPES = ("bigram", "blockwise", "medusa", "mlp_speculator", "mtp", "mtp_heads")
_MODEL_TYPES += ("pass_embeddings", "prefix_speculator", "recurrent_drafting_drafter")


@dataclasses.dataclass(frozen=True, eq=False)
class HeadLM:
    """A drafter with its weights, loaded for one target: what ``generate(drafter=)`` takes.

    Attributes:
      drafter: the drafter. Above temperature 0 ``specjax.generate`` has it draw its tokens;
        ``specjax.decode`` takes it as it is, with its most probable tokens: give
        ``dataclasses.replace(heads.drafter, sibling_sampling="iid")`` (``"distinct"`` for trees).
      params: its weights, ``params["drafter"]`` of ``specjax.decode``.
      name: the folder or hub name that ``load_drafter`` was given; of a model's own heads, which
        ``generate`` finds by their name, that name.
      fingerprint: a hash of the files of weights.
      target: the ``LM.checkpoint`` of the target for which it was loaded.
    """

    drafter: Drafter
    params: PyTree
    name: str
    fingerprint: str
    target: str

    def __repr__(self) -> str:
        return f"HeadLM({self.name!r}, {self.drafter.name})"


def load_drafter(
    path_or_hub_name: str | os.PathLike,
    target: LM,
    *,
    topology=None,
    revision: str | None = None,
) -> HeadLM:
    """Loads a drafter that reads the hidden states of ``target``, whatever its layout.

    Args:
      path_or_hub_name: a folder, or a name on the Hugging Face hub.
      target: what ``specjax.load`` returned (for an encoder-decoder model there are SpecDec
        drafters alone), or ``LM.of`` of a ``HeadTarget`` of your own (the
        layouts whose layers are copies of the target's, MTP modules and Hydra's prefix, need a
        model that was loaded). The drafter's weights are converted to its dtype; on a CPU, float32
        weights that bfloat16 represents exactly are kept in bfloat16.
      topology: the tree to draft, as ``specjax.trees.as_topology`` takes it. Default: the tree that
        is stored with the weights, else the drafter's ``default_topology``: a chain of all heads
        of a fixed number; for EAGLE, EAGLE-3 and P-EAGLE one of three tokens, or of as many as
        they were trained for where that is less.
      revision: branch, tag or commit on the hub.

    Returns:
      The drafter with its weights.

    Warns:
      UserWarning: the tree is deeper than the file says that the heads were trained; the token that
        stands for drafted ones is one that the target's tokenizer decodes to text; the file names
        another target on the hub.

    Raises:
      FileNotFoundError: there is no such folder, or it lacks its config or weights.
      ValueError: the name is that of a method, such as ``"eagle3"``, and no folder; the layout is
        not known; tensors are missing, misshapen or left over; the drafter
        belongs to another target (by hidden size, vocabulary or fingerprint); the topology is
        deeper than the drafter can draft.
      TypeError: the name is neither a text nor a path; ``target`` is no ``LM`` of a
        ``HeadTarget``, or the layout needs one that was loaded.
      OSError: the hub does not have it, or cannot be reached.

    Example::

        lm = specjax.load("lmsys/vicuna-7b-v1.3")
        heads = specjax.load_drafter("FasterDecoding/medusa-vicuna-7b-v1.3", lm)
        specjax.generate(lm, "...", drafter=heads)
    """
    if isinstance(path_or_hub_name, LM):
        raise TypeError(
            f"path_or_hub_name={path_or_hub_name!r:.60}: the heads come first and then their "
            "target: give load_drafter(path_or_hub_name, target)"
        )
    if not isinstance(target, LM) or not (encodes(target) or is_read(target)):
        raise TypeError(
            f"target={target!r:.60}: heads read the hidden states of a decoder; give what "
            "specjax.load returns for a decoder-only model (for SpecDec also for an "
            "encoder-decoder model), or specjax.LM.of(target, weights), where the target is a "
            "specjax.HeadTarget"
        )
    name = name_of("path_or_hub_name", path_or_hub_name)
    _refuse_method(name)
    shape = None if topology is None else as_topology(topology, "topology")
    folder = folder_of(name, revision, _HUB_FILES)
    try:
        drafter, params, found = _read(folder, target, shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    config = read_json(folder, "config.json")
    masks.warn_of_text(name, config, drafter, target)
    _warn_of_verifier(name, config, target)
    return HeadLM(
        drafter=drafter, params=params, name=name, fingerprint=found, target=target.checkpoint
    )


def is_read(target: LM) -> bool:
    """Whether heads can read the hidden states of a target."""
    return isinstance(target.target, HeadTarget)


def _refuse_method(name: str) -> None:
    """Raises ``ValueError`` for the registered name of a drafter, unless there is such a folder."""
    entry = registry.find(name)
    if entry is None or Path(name).is_dir():
        return
    where = f"path_or_hub_name={name!r}: that is the registered name of a method"
    if entry.kind != "head":
        raise ValueError(
            f"{where} that has no heads to load: give drafter={name!r} to specjax.generate (an "
            f"object has the class specjax.drafters.{entry.class_name})"
        )
    recipe = entry.recipe.rpartition(".")[2]
    train = f"`specjax train {recipe} --help` says how to train some; " if recipe else ""
    raise ValueError(
        f"{where}, not of weights: give a folder or a hub name (owner/name) that holds "
        f"{entry.name} heads for your target. {train}specjax.generate(drafter={name!r}) takes the "
        "heads in the target's own folder"
    )


def says_heads(config: dict) -> bool:
    """Whether a ``config.json`` alone tells that a folder holds heads."""
    kinds = " ".join(config.get("architectures") or ())
    if config.get("model_type") in _MODEL_TYPES or "Eagle" in kinds:
        return True
    return any(key.startswith(_CONFIG_KEYS) for key in config)


def holds_heads(name: str | os.PathLike, config: dict) -> bool:
    """Whether a folder or hub name holds heads rather than a model, both of which may have the same
    ``model_type``. The config tells, except for EAGLE's and Kangaroo's, which read like a model of
    one layer: there the names of the tensors tell."""
    if says_heads(config):
        return True
    if config.get("num_hidden_layers") != 1:
        return False
    names = {*Tensors(folder_of(os.fspath(name), None, _HUB_FILES))}
    return eagle.matches(config, names) or kangaroo.matches(config, names)


def _warn_of_verifier(name: str, config: dict, target: LM) -> None:
    """Warns where a config of the package speculators or of DeepSpec names another target on the
    hub. Nothing is refused: the target may be a copy under another name, or a fine-tuned one."""
    said, where = config.get("speculators_config"), "speculators_config.verifier"
    verifier = said.get("verifier") if isinstance(said, dict) else None
    meant = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if meant is None:
        where = "target_model_name_or_path"
        meant = config.get(where)
    if not isinstance(meant, str) or not target.loaded or Path(target.name).exists():
        return
    names = [one.casefold().split("/") for one in (meant, target.name)]
    if all(len(parts) == 2 for parts in names) and names[0][1] != names[1][1]:
        warnings.warn(
            f"{name}: its config.json says that it drafts for {meant} ({where}), and the target "
            f"is {target.name}: of another model's heads few drafts are accepted",
            stacklevel=callers.outside(),
        )


def _read(folder: Path, target: LM, shape: Topology | None) -> tuple[Drafter, PyTree, str]:
    """The drafter of a folder, its weights, and their fingerprint; ``shape``: what it drafts, None:
    the tree that is stored."""
    config, tensors = read_json(folder, "config.json"), Tensors(folder)
    _check_objects(config)
    layout = next((f for f in FORMATS.values() if f.matches(config, {*tensors})), None)
    if layout is None:
        known = "; ".join(layout.DESCRIPTION for layout in FORMATS.values())
        kinds = (config.get(key) for key in ("speculators_model_type", "model_type"))
        kind = next(filter(None, kinds), config.get("architectures"))
        raise ValueError(
            f"it is in no layout of heads that is known (model_type={kind!r}, tensors "
            f"{listed([*tensors])}). A draft model is loaded with specjax.load, or named as "
            f"drafter= of specjax.generate. Layouts of heads that are read: {known}"
        )
    reads_states = issubclass(layout.DRAFTER, HeadDrafter)
    if not is_read(target) and reads_states and not layout.DRAFTER.serves_encoders:
        raise ValueError(
            f"a {layout.DRAFTER.__name__} reads the hidden states of a decoder-only model, and "
            f"{target.name} is an encoder-decoder model; accepted are SpecDec drafters, and draft "
            "models that read the same inputs"
        )
    own = config.get("specjax") or {}
    drafter, params = layout.load(config, tensors, target)
    made_for = own.get("target_fingerprint")
    if made_for and target.checkpoint and made_for != target.checkpoint:
        raise ValueError(
            f"it was trained for a target with the fingerprint {made_for}, and {target.name} has "
            f"{target.checkpoint}: load the target that it belongs to. For a similar target (a "
            'fine-tuned one), delete "target_fingerprint" from its config.json: the text stays '
            "that of the target, but fewer drafted tokens may be accepted"
        )
    drafter = _with_trained_depth(drafter, own)
    if shape is None and (tree := own.get("tree")):
        more = {name: own[name] for name in (*SETTINGS, "siblings") if name in own}
        try:
            shape = _grown(tree, more) if more else as_topology(tree)
        except TypeError as error:
            raise ValueError(f'config.json: "specjax": {error}') from None
    if shape is not None:
        drafter = drafter.with_topology(shape)
    drafter = _with_settings(drafter, own)
    if target.dtype == jnp.float32:
        params = kernels.of(target.params).store(params)
    params = kernels.of(params).settle(params)
    return drafter, params, fingerprint(tensors.files)


def _check_objects(config: dict) -> None:
    """Raises ``ValueError`` where what must be an object, if it is there, is something else."""
    for key in _OBJECTS:
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(
                f"config.json: {key}={config[key]!r}: it must be an object, or be left out"
            )


def _with_settings(drafter: Drafter, own: dict) -> Drafter:
    """The drafter with those of its ``stored_settings`` that its file holds."""
    if not isinstance(drafter, HeadDrafter):
        return drafter
    usual = drafter.usual_settings
    found = {name: own[name] for name in usual if name in own}
    for name, value in found.items():
        if isinstance(usual[name], float):
            check_numbers(**{name: value})
        elif type(usual[name]) is int:
            check_integers(**{name: value})
        elif type(value) is not bool:
            raise ValueError(f"config.json: {name}={value!r}: it must be true or false")
    return dataclasses.replace(drafter, **found)


def _grown(tree: str, settings: dict) -> Expand:
    """The tree ``"expand:3x2x5"`` with further fields. Which sizes it may have depends on them."""
    kind, _, sizes = str(tree).partition(":")
    numbers = sizes.split("x")
    if kind != "expand" or len(numbers) != 3 or not all(x.isdigit() for x in numbers):
        raise ValueError(
            f'config.json: "specjax" has {", ".join(settings)} beside "tree": {tree!r}; they '
            'belong to a tree such as "expand:3x2x5"'
        )
    return Expand(*map(int, numbers), **settings)


def _with_trained_depth(drafter: Drafter, own: dict) -> Drafter:
    """The drafter with what ``config["specjax"]`` says of its training, unless its layout has a key
    for that."""
    most = own.get("trained_depth")
    if most is None or not isinstance(drafter, HeadDrafter) or drafter.trained_depth is not None:
        return drafter
    check_integers(trained_depth=most)
    if most < 1:
        raise ValueError(f'config.json: "specjax": trained_depth={most}: it must be at least 1')
    usual = drafter.topology == drafter.default_topology
    tree = None if usual else drafter.topology  # None: the usual one, which may follow from it
    return dataclasses.replace(drafter, trained_depth=most, topology=tree)
