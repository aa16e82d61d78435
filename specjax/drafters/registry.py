"""The one place where a drafter is registered.

An ``Entry`` of the table below makes a drafter known to everything that lists drafters: the library
(``specjax.drafters.Medusa``), the names that users type, the errors and help texts that list them,
the layouts (``specjax.checkpoints.FORMATS``), the recipes of ``specjax train``, and the tests.

To add a method with weights, write one file for its drafter (a ``HeadDrafter``, see ``heads.py``),
one for its layout on disk (see ``checkpoints/README.md``), one for its recipe, and add one entry. A
drafter that lives outside of this package is registered by the same line at run time::

    from specjax.drafters import registry

    own = dict(formats=("my_package.layout",), recipe="my_package.recipe")
    path, summary = "my_package.heads:MyHeads", "what my heads propose"
    registry.register(registry.Entry("my-heads", path, summary, **own))
"""

from __future__ import annotations

import importlib
from types import ModuleType

from .entry import Entry as Entry
from .entry import Kind as Kind

DRAFT = "draft"  # the name of a draft model
_ENTRIES: dict[str, Entry] = {}


def register(entry: Entry) -> Entry:
    """Makes a drafter known; see the module's docstring.

    Raises:
      ValueError: another drafter has the name or an alias of this one, ``path`` is none, or a head
        has no formats.
    """
    if not all(entry.path.partition(":")):
        raise ValueError(f"path={entry.path!r}: it must name a class, as 'package.module:Class'")
    for name in (entry.name, *entry.aliases):
        other = find(name)
        if other is not None and other != entry:
            raise ValueError(f"name={name!r} belongs to {other.path} already: take another one")
    if entry.kind == "head" and not entry.formats:
        raise ValueError(
            f"formats=() of {entry.name!r}: a head has its weights in a folder, in one of its "
            "formats; give formats=('package.module',), or kind='table' for a drafter without "
            "weights, which is made by its name (kind='wrapper': one made of other drafters)"
        )
    _ENTRIES[entry.name] = entry
    return entry


def find(name: str) -> Entry | None:
    """The drafter of a name or alias; None: no drafter has it."""
    if name in _ENTRIES:
        return _ENTRIES[name]
    return next((entry for entry in _ENTRIES.values() if name in entry.aliases), None)


def drafter_class(name: str) -> type:
    """Imports the class of a name or alias.

    Raises:
      ValueError: no drafter has it.
    """
    entry = find(name)
    if entry is None:
        raise ValueError(f"name={name!r}: no such drafter; known are {', '.join(_ENTRIES)}")
    return entry.load()


def entries(kind: Kind | None = None) -> tuple[Entry, ...]:
    """All registered drafters, or those of one kind, in the order of registration."""
    return tuple(entry for entry in _ENTRIES.values() if kind in (None, entry.kind))


def head_names() -> tuple[str, ...]:
    """Names of the drafters whose weights lie in a folder of heads."""
    return tuple(entry.name for entry in entries("head"))


def in_folders() -> tuple[Entry, ...]:
    """The drafters of a model's own folder that ``auto`` may take, in the order of registration."""
    held = (entry for entry in entries() if entry.kind == "head" or entry.name == DRAFT)
    return tuple(entry for entry in held if entry.priority is not None)


def table_names() -> tuple[str, ...]:
    """Names, aliases among them, of the drafters that need neither weights nor a model."""
    return tuple(name for entry in entries("table") for name in (entry.name, *entry.aliases))


def format_name(module: str) -> str:
    """The name of a format by its module: ``medusa-vllm`` for ``.medusa_vllm``."""
    return module.rpartition(".")[2].replace("_", "-")


def formats() -> dict[str, str]:
    """Formats to their modules, of all drafters, each once, in the order of registration."""
    return {format_name(module): module for entry in entries() for module in entry.formats}


def formats_of(drafter: object) -> tuple[str, ...]:
    """Names of the formats that may hold a drafter, the one usually written first; empty: none.

    A drafter of a class that is not registered has those of the class that it extends.
    """
    for kind in type(drafter).__mro__:
        for entry in entries():
            if entry.class_name == kind.__name__ and entry.load() is kind:
                return tuple(map(format_name, entry.formats))
    return ()


def recipes() -> dict[str, tuple[str, ...]]:
    """Modules of recipes to the names of the drafters that each of them trains."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in entries():
        if entry.recipe:
            found[entry.recipe] = (*found.get(entry.recipe, ()), entry.name)
    return found


def load_module(name: str, package: str) -> ModuleType:
    """The module of a format or recipe, relative to ``package`` where it begins with a dot."""
    return importlib.import_module(name, package)


for _entry in (
    Entry("plain", ".plain:Plain", "nothing", kind="basic", aliases=("none",)),
    Entry(
        DRAFT, ".draft_model:DraftModel", "what a smaller model predicts", kind="basic", priority=-1
    ),
    Entry(
        "tli",
        ".tli:TLI",
        "what a smaller model with other tokens predicts of those that both have",
        kind="basic",
    ),
    Entry(
        "slem",
        ".slem:SLEM",
        "the string that a smaller model with other tokens predicts",
        kind="basic",
    ),
    Entry(
        "self", ".self_draft:SelfDraft", "what a part of the target's layers predicts", kind="basic"
    ),
    Entry("switched-self", ".switched_self:SwitchedSelfDraft", "as self, by array", kind="object"),
    Entry(
        "ngram",
        ".ngram:NGram",
        "what followed the last tokens of the text where they stood before",
        kind="table",
    ),
    Entry(
        "suffix", ".suffix:Suffix", "what most often followed the text's last tokens", kind="table"
    ),
    Entry(
        "sam", ".sam:SAM", "what followed the text's longest end that stood before", kind="table"
    ),
    Entry(
        "bigram",
        ".bigram:Bigram",
        "the token that most often followed the last one in texts that were counted",
        formats=(".bigram",),
        priority=None,
    ),
    Entry(
        "recycling",
        ".recycling:Recycling",
        "the successors that the target last found most probable for each token",
        kind="table",
    ),
    Entry(
        "jacobi", ".jacobi:Jacobi", "what the target predicted after its own guesses", kind="table"
    ),
    Entry(
        "lookahead",
        ".lookahead:Lookahead",
        "n-grams that the target predicted at later positions",
        kind="table",
    ),
    Entry(
        "adaptive", ".adaptive:Adaptive", "as many tokens of another drafter as pay", kind="wrapper"
    ),
    Entry(
        "hybrid",
        ".hybrid:Hybrid",
        "a copy from the text, else what another drafter proposes",
        kind="wrapper",
    ),
    Entry(
        "fallback",
        ".fallback:Fallback",
        "what a table holds, else what another drafter proposes",
        kind="wrapper",
    ),
    Entry(
        "cascade",
        ".cascade:Cascade",
        "what a draft model predicts, which another drafter drafts for",
        kind="wrapper",
    ),
    Entry(
        "copying",
        ".copying:Copying",
        "what another drafter proposes, at temperature 0 with a bonus for what followed the same "
        "words",
        kind="wrapper",
    ),
    Entry(
        "drawn-or-top",
        ".drawn_or_top:DrawnOrTop",
        "what another drafter draws or its most probable tokens, whichever was accepted more often",
        kind="wrapper",
    ),
    Entry("horizontal", ".horizontal:Horizontal", "several drafters in turn", kind="wrapper"),
    Entry("union", ".union:Union", "what several drafters propose, as one tree", kind="wrapper"),
    Entry(
        "synthetic",
        ".synthetic:Synthetic",
        "known texts with a stated share of errors, for benchmarks",
        kind="wrapper",
    ),
    Entry(
        "sparse-draft",
        ".sparse_draft:SparseDraftModel",
        "what a smaller model predicts over chosen entries of its own cache",
        kind="object",
    ),
    Entry(
        "probed-draft",
        ".probe:ProbedDraftModel",
        "what a smaller model predicts, up to the first token that its probe flags",
        kind="object",
    ),
    Entry(
        "llmcad",
        ".llmcad:LLMCad",
        "a tree that a smaller model grows until it is unsure of all of its branches",
        kind="object",
    ),
    Entry("pearl", ".pearl:PEARL", "what a draft model drafts a round ahead", kind="object"),
    Entry("ssd", ".ssd:SSD", "what a smaller model drafted for each outcome", kind="object"),
    Entry(
        "medusa",
        ".medusa:Medusa",
        "a token by each of several heads on the last hidden state",
        formats=(".medusa", ".medusa_vllm"),
        recipe=".heads",
        priority=1,
    ),
    Entry(
        "hydra",
        ".hydra:Hydra",
        "a token by each of several heads on the last hidden state and the drafted tokens",
        formats=(".hydra",),
        recipe=".hydra",
        priority=5,
    ),
    Entry(
        "blockwise",
        ".blockwise:Blockwise",
        "a token for each offset, by one hidden layer",
        formats=(".blockwise",),
        recipe=".heads",
        priority=1,
    ),
    Entry(
        "speculator",
        ".speculator:Speculator",
        "what an MLP or LSTM cell on the last hidden state predicts",
        formats=(".speculator",),
        recipe=".speculator",
        priority=6,
    ),
    Entry(
        "redrafter",
        ".redrafter:ReDrafter",
        "the beams of a recurrent head on the last hidden state",
        formats=(".redrafter",),
        recipe=".speculator",
        priority=4,
    ),
    Entry(
        "eagle",
        ".eagle:Eagle",
        "what a decoder layer on hidden states and drafted tokens predicts",
        formats=(".eagle", ".eagle_sglang"),
        recipe=".eagle",
        priority=7,
    ),
    Entry(
        "eagle3",
        ".eagle3:Eagle3",
        "what a decoder layer on the hidden states of several layers predicts",
        formats=(".eagle3", ".eagle3_speculators", ".eagle3_deepspec"),
        recipe=".eagle3",
        priority=12,
    ),
    Entry(
        "p-eagle",
        ".peagle:PEagle",
        "all depths of an EAGLE-3 head in one pass",
        formats=(".eagle3", ".eagle3_speculators"),
        recipe=".eagle3",
        priority=8,
        raised=("dependency_size", 10),  # places that read the draft
    ),
    Entry(
        "block",
        ".block:BlockDrafter",
        "a block of masked tokens filled in by one pass (DFlash)",
        formats=(".dflash", ".dspark", ".block_speculators"),
        recipe=".block",
        aliases=("dflash",),
        priority=2,
    ),
    Entry(
        "dspark",
        ".dspark:DSpark",
        "a block filled in at once, each token then given the one before (DSpark)",
        formats=(".dspark", ".block_speculators"),
        recipe=".dspark",
        priority=9,
    ),
    Entry(
        "dflash2",
        ".dflash2:DFlash2",
        "a block filled in at once, each token then chosen among candidates (DFlash2)",
        formats=(".dflash2", ".block_speculators"),
        recipe=".block_heads",
        priority=2,
    ),
    Entry(
        "domino",
        ".domino:Domino",
        "a block filled in at once, each token then given all before it (Domino)",
        formats=(".domino",),
        recipe=".block_heads",
        priority=3,
    ),
    Entry(
        "xpress",
        ".xpress:XPress",
        "a block filled in at once, whose tokens are then refined all at once (XPress)",
        formats=(".xpress", ".block_speculators"),
        recipe=".block_heads",
        priority=3,
    ),
    Entry(
        "lilicorr",
        ".lilicorr:LiLiCorr",
        "a block filled in at once, its candidates then matched by a small network (LiLiCorr)",
        formats=(".lilicorr",),
        recipe=".block_heads",
        priority=2,
    ),
    Entry(
        "specdiff",
        ".specdiff:SpecDiff",
        "a block of masks filled in by several passes (SpecDiff)",
        formats=(".specdiff",),
        recipe=".specdiff",
        priority=2,
    ),
    Entry(
        "specdec",
        ".specdec:SpecDec",
        "masks filled in at once by a small encoder-decoder that reads the source (SpecDec)",
        formats=(".specdec",),
        recipe=".specdec",
    ),
    Entry(
        "pass",
        ".pass_embeddings:PaSS",
        "what the target says at learned vectors after the text (PaSS)",
        formats=(".pass_embeddings",),
        recipe=".pass_embeddings",
    ),
    Entry(
        "mtp",
        ".mtp:MTP",
        "what modules for multi-token prediction predict",
        formats=(".mtp",),
        recipe=".mtp",
        priority=11,
    ),
    Entry(
        "mtp_heads",
        ".mtp_heads:ParallelHeads",
        "what parallel heads of multi-token prediction predict",
        formats=(".mtp_heads",),
        recipe=".mtp_heads",
        priority=1,
    ),
    Entry(
        "kangaroo",
        ".kangaroo:Kangaroo",
        "what the target's own first layers and a small adapter predict",
        formats=(".kangaroo",),
        recipe=".kangaroo",
    ),
    Entry(
        "spire",
        ".spire:SPIRe",
        "what the target's last layers predict over a window, with memories of each token (SPIRe)",
        formats=(".spire",),
        recipe=".spire",
    ),
):
    register(_entry)
