"""Every drafter of the project and every shape of draft, one line for each.

A line is ``name: (drafter, weights of the drafter, rules)``; conformance tests run over all lines.
"""

import collections.abc
import dataclasses
import functools

import jax
import numpy as np
import two_vocabularies
from block_lines import block_lines
from combinations import RASH, TREE, adaptive, combinations, copying, fallback, hybrid, learned
from toys import TreeDrafter, bag, counted, decoder_weights, heads, like, probe, shared, small_layer

from specjax import trees
from specjax.drafters import (
    PEARL,
    SAM,
    SSD,
    Bigram,
    DraftModel,
    Jacobi,
    LLMCad,
    Lookahead,
    NGram,
    Plain,
    ProbedDraftModel,
    Recycling,
    SelfDraft,
    SparseDraftModel,
    Suffix,
    SwitchedSelfDraft,
    Union,
)
from specjax.drafters.blockwise import Blockwise, BlockwiseConfig
from specjax.drafters.confidence_stop import ConfidenceStop, CumulativeStop
from specjax.drafters.eagle import Eagle, EagleConfig
from specjax.drafters.eagle3 import Eagle3, Eagle3Config
from specjax.drafters.hydra import Hydra, HydraConfig
from specjax.drafters.kangaroo import Kangaroo, KangarooConfig
from specjax.drafters.medusa import Medusa, MedusaConfig
from specjax.drafters.mtp import MTP, MTPConfig
from specjax.drafters.mtp_heads import MTPHeadsConfig, ParallelHeads
from specjax.drafters.pass_embeddings import PaSS, PaSSConfig
from specjax.drafters.peagle import PEagle
from specjax.drafters.redrafter import ReDrafter, ReDrafterConfig
from specjax.drafters.speculator import Speculator, SpeculatorConfig
from specjax.drafters.spire import SPIRe, SPIReConfig
from specjax.models import CausalLM, TopChunks

ALL = ("rejection", "delta")
CHAIN = ("rejection", "block", "delta")
LSTM = dict(cell="lstm", inner_size=5, tied=True, scaled=True)
WIDE = dict(exit_size=5, num_layers=1, kept=3)


class Cases(collections.abc.Mapping):
    """The lines of the registry; the weights of a line are drawn when it is read."""

    def __init__(self, lines):
        self.lines = lines
        self.read = {}

    def __getitem__(self, name):
        if name not in self.read:
            drafter, weights, rules = self.lines[name]
            lazy = lambda x: isinstance(x, functools.partial)  # noqa: E731
            weights = jax.tree.map(lambda x: x() if lazy(x) else x, weights, is_leaf=lazy)
            self.read[name] = drafter, weights, rules
        return self.read[name]

    def __iter__(self):
        return iter(self.lines)

    def __len__(self):
        return len(self.lines)

    def rules(self, name):
        """The rules of a line, without its weights."""
        return self.lines[name][2]


def cases(model, params, near=None, other=None):
    """Cases for a target ``model`` with weights ``params``: a toy, or another one whose draft
    models have its shape, with weights ``near`` its own and with ``other`` ones."""
    if near is None:
        near, other = like(params, 1), bag(model.vocab_size, 99)[1]
    hidden_size = model.hidden_size or params["embed"].shape[1]

    def tree(**settings):
        return TreeDrafter(model=model, **settings)

    def head(drafter, config, parents, rules=("delta",), picks="top", layer=None, **shape):
        """Heads on the toy's hidden state; ``parents`` are a static tree or another topology."""
        config = config(hidden_size=hidden_size, vocab_size=model.vocab_size, **shape)
        drafter = drafter(
            config=config,
            target=model,
            topology=trees.as_topology(parents),
            layer=layer,
            sibling_sampling=picks,
        )
        return drafter, functools.partial(heads, drafter), rules

    layer = small_layer(model.vocab_size, hidden_size)
    layers = dataclasses.replace(layer, num_layers=2, qk_norm=True)
    windowed = dataclasses.replace(layer, cache_window=3, sinks=1)

    def eagle(hidden_size, vocab_size):
        return EagleConfig(layer=layer, fc_bias=True)

    def eagle3(hidden_size, vocab_size, **shape):
        vocab = dict(draft_vocab_size=vocab_size - 1)
        return Eagle3Config(layer=layer, num_features=1, **vocab | shape)

    def modules(hidden_size, vocab_size, **shape):
        return MTPConfig(layer=layer, num_modules=2, **shape)

    def parallel(hidden_size, vocab_size):
        return MTPHeadsConfig(layers=layers)

    def kangaroo(hidden_size, vocab_size):
        return KangarooConfig(layer=layer)

    def spire(hidden_size, vocab_size):
        return SPIReConfig(layers=layer, window=5, sinks=1)

    words = dict(vocab_size=model.vocab_size)
    unsure = functools.partial(Kangaroo, threshold=0.45)
    prefixed = functools.partial(SpeculatorConfig, prefix=layer, **LSTM)
    top = functools.partial(Eagle3, layers=(1,))  # the toy has only one layer
    once = functools.partial(PEagle, layers=(1,))
    across = two_vocabularies.lines(model.vocab_size, near)
    small = CausalLM(windowed, axis=None), functools.partial(decoder_weights, windowed)
    plain = CausalLM(layer, axis=None)
    lines = across | combinations(model, near, other, *small)
    lines |= {
        "plain": (Plain(), None, ("delta", "coupled")),
        "draft": (DraftModel(num_draft=3, model=model), near, CHAIN),
        "draft one": (DraftModel(num_draft=1, model=model), near, ("rejection",)),
        "draft itself": (DraftModel(num_draft=3, model=model), params, ("rejection", "block")),
        "draft tree iid": (
            DraftModel(model=model, topology=trees.Tree(TREE)),
            near,
            ("rejection", "kseq", "coupled", "gls"),
        ),
        "draft tree distinct": (
            DraftModel(model=model, topology=trees.branching(2, 1, 1), sibling_sampling="distinct"),
            near,
            ("rejection",),
        ),
        "draft tree hub": (
            DraftModel(model=model, topology=trees.Tree(TREE), sibling_sampling="hub"),
            near,
            ("rejection", "hub"),
        ),
        "windowed draft": (
            DraftModel(num_draft=2, model=small[0]),
            small[1],
            CHAIN,
        ),
        "sparse draft": (
            SparseDraftModel(
                num_draft=2, model=plain, window=3, sinks=1, chunks=TopChunks(budget=2, chunk=1)
            ),
            functools.partial(decoder_weights, layer),
            CHAIN,
        ),
        "pearl": (PEARL(2, model=model), near, (*CHAIN, "coupled")),
        "ssd": (SSD(2, model=model, fan_out=(2, 1, 1)), near, (*CHAIN, "coupled")),
        "adaptive pearl": adaptive((PEARL(3, model=model), near, ("rejection",))),
        "hybrid ssd": hybrid(4, (SSD(2, model=model, fan_out=2), near, ("rejection",))),
        "probed draft": (
            ProbedDraftModel(num_draft=3, model=model),
            {"model": near, "probe": functools.partial(probe, hidden_size)},
            CHAIN,
        ),
        "self": (SelfDraft(num_draft=3, target=model, exit=1), None, CHAIN),
        "self stop": (
            SelfDraft(
                num_draft=4,
                target=model,
                exit=1,
                stop=ConfidenceStop(threshold=0.4, step=0.5, target_rate=0.5),
            ),
            None,
            ("rejection", "block"),
        ),
        "self skip": (SelfDraft(num_draft=2, target=model, skip="mlp.0"), None, ("rejection",)),
        "switched-self": (
            SwitchedSelfDraft(num_draft=2, target=model),
            {"switches": np.asarray([[True, False]])},
            ("rejection",),
        ),
        "self tree": (
            SelfDraft(target=model, topology=trees.Tree(TREE), exit=1, sibling_sampling="distinct"),
            None,
            ("rejection",),
        ),
        "self expanded": (
            SelfDraft(target=model, topology=trees.Expand(2, 3, 6), exit=1),
            None,
            ("delta",),
        ),
        "draft expanded": (
            DraftModel(model=model, topology=trees.Expand(2, 3, 6)),
            near,
            ("delta", "coupled"),
        ),
        "draft expanded by gain": (
            DraftModel(model=model, topology=trees.Expand(2, 3, 6, gain=0.3, sharpness=2.0)),
            near,
            ("delta",),
        ),
        "llmcad": (
            LLMCad(
                model=model,
                topology=trees.Expand(3, 3, 6, branch=0.25),
                stop=CumulativeStop(threshold=0.3),
            ),
            near,
            ("delta", "coupled"),
        ),
        "llmcad chain": (
            LLMCad(model=model, topology=trees.chain(4), stop=CumulativeStop(threshold=0.3)),
            near,
            ("rejection", "block"),
        ),
        "llmcad tree": (
            LLMCad(
                model=model,
                topology=trees.Tree(TREE),
                sibling_sampling="distinct",
                stop=CumulativeStop(threshold=0.5),
            ),
            near,
            ("rejection", "traversal"),
        ),
        "draft unrelated": (DraftModel(num_draft=2, model=model), other, ("rejection",)),
        "ngram": (
            NGram(num_draft=5, longest=2, shortest=1, stretch=2),
            None,
            ("delta", "rejection", "block", "coupled"),
        ),
        "suffix": (Suffix(num_draft=4, **RASH), None, ("delta", "rejection", "block")),
        "suffix tree": (
            Suffix(topology=trees.Expand(2, 3, 6), **RASH),
            None,
            ("delta", "traversal"),
        ),
        "suffix and table": (
            Suffix(num_draft=4, **RASH),
            functools.partial(shared, model.vocab_size),
            ("delta",),
        ),
        "sam": (
            SAM(num_draft=4, longest=4, shortest=1, occurrences=4, block=2),
            tuple(functools.partial(shared, model.vocab_size, n) for n in (1, 4)),
            ("delta", "block"),
        ),
        "ngram tree": (
            NGram(topology=trees.chains(2, 3), longest=2, shortest=1, stretch=3),
            None,
            ("delta", "traversal"),
        ),
        "ngram earliest": (
            NGram(num_draft=3, longest=2, shortest=1, stretch=3, choice="earliest"),
            None,
            ("delta",),
        ),
        "bigram": (
            Bigram(num_draft=3, **words),
            functools.partial(counted, model.vocab_size),
            ("delta", "rejection", "block", "coupled"),
        ),
        "bigram order 3": (
            Bigram(num_draft=4, order=3, **words),
            functools.partial(counted, model.vocab_size, 3),
            ("delta",),
        ),
        "recycling": (
            Recycling(topology=trees.branching(2, 2, 1), **words),
            None,
            ("delta", "traversal"),
        ),
        "recycling chain": (Recycling(num_draft=3, reads_prompt=False, **words), None, ("block",)),
        "jacobi": (Jacobi(num_draft=3), None, ("delta", "block", "coupled")),
        "jacobi blocks": (Jacobi(num_draft=4, mode="blocks"), None, ("rejection",)),
        "jacobi hybrid": (Jacobi(num_draft=3, mode="hybrid", until=5), None, ("delta",)),
        "lookahead": (
            Lookahead(window=3, ngram=3, guesses=2, **words),
            None,
            ("delta", "traversal", "coupled"),
        ),
        "lookahead text": (
            Lookahead(window=2, ngram=4, guesses=3, reads_text=True, **words),
            None,
            ("rejection",),
        ),
        "lookahead pairs": (Lookahead(window=4, ngram=2, guesses=3, **words), None, ("delta",)),
        "fallback mtp": fallback(
            head(MTP, modules, (-1, 0, 1), ("rejection",), picks="iid", share_layers=True)
        ),
        "hybrid mtp": hybrid(
            3,
            head(MTP, modules, (-1, 0, 1), ("rejection",), picks="iid", share_layers=True),
        ),
        "adaptive slem": adaptive(across["slem"]),
        "hybrid tli": hybrid(4, across["tli"]),
        "adaptive hybrid": adaptive(hybrid(3, head(top, eagle3, (-1, 0, 1), rules=("delta",)))),
        "adaptive union": adaptive(
            (
                Union(
                    drafters=(
                        head(top, eagle3, (-1, 0, 1))[0],
                        Jacobi(num_draft=3),
                    )
                ),
                (head(top, eagle3, (-1, 0, 1))[1], None),
                ("delta",),
            )
        ),
        "blockwise": head(Blockwise, BlockwiseConfig, (-1, 0, 0), trunk_size=5),
        "medusa": head(Medusa, MedusaConfig, TREE, tied=True),
        "hydra": head(Hydra, HydraConfig, TREE, ("rejection",), picks="iid"),
        "hydra prefix": head(Hydra, HydraConfig, (-1, 0), num_layers=2, prefix=layer),
        "mlp speculator": head(
            Speculator,
            SpeculatorConfig,
            (-1, 0, 1, 2),
            ("block",),
            picks="iid",
            inner_size=5,
        ),
        "lstm speculator": head(
            Speculator, SpeculatorConfig, TREE, ("rejection",), picks="distinct", **LSTM
        ),
        "speculator prefix": head(Speculator, prefixed, (-1, 0, 1), picks="iid"),
        "adaptive speculator prefix": adaptive(head(Speculator, prefixed, (-1, 0, 1), rules=())),
        "hybrid speculator prefix": hybrid(3, head(Speculator, prefixed, (-1, 0, 1))),
        **block_lines(head, layers, model.vocab_size),
        "eagle": head(Eagle, eagle, TREE, ("rejection",), picks="distinct"),
        "eagle3": head(top, eagle3, (-1, 0, 1, 2), ("block", "coupled"), picks="iid"),
        "adaptive eagle3": adaptive(head(top, eagle3, trees.Expand(2, 3, 5), rules=())),
        "copying medusa": copying(head(Medusa, MedusaConfig, TREE, ("rejection",), picks="iid")),
        "copying eagle3": copying(head(top, eagle3, TREE, ("rejection",), picks="distinct")),
        "adaptive copying": adaptive(copying(head(top, eagle3, trees.Expand(2, 3, 5), rules=()))),
        "learned p-eagle": learned(head(once, eagle3, (-1, 0), picks="iid", mask_token=0)),
        "p-eagle": head(once, eagle3, TREE, ("rejection",), picks="distinct", mask_token=0),
        "p-eagle dependent": head(
            once, eagle3, TREE, ("rejection",), picks="distinct", mask_token=0, dependency_size=5
        ),
        "adaptive p-eagle dependent": adaptive(  # whose nodes with children are 1, 2 and 1
            head(
                *(once, eagle3, (-1, 0, 0, 1, 2, 3)),
                **dict(rules=(), mask_token=0, dependency_size=5, draft_vocab_size=0),
            )
        ),
        "mtp": head(MTP, modules, TREE, ("rejection",), picks="distinct", share_layers=True),
        "mtp distinct": head(MTP, modules, (-1, 0, 0, 1), normed_output=True),
        "mtp heads": head(ParallelHeads, parallel, (-1, 0, 0, 1), layer=1),
        "pass": head(PaSS, PaSSConfig, (-1, 0, 0, 1), ("rejection",), picks="iid", num_heads=2),
        "kangaroo": head(
            unsure, kangaroo, (-1, 0, 1, 2), ("rejection", "block"), picks="iid", layer=1
        ),
        "kangaroo tree": head(unsure, kangaroo, TREE, ("rejection",), picks="distinct", layer=1),
        "adaptive kangaroo": adaptive(
            head(unsure, kangaroo, trees.Expand(2, 3, 5), rules=(), layer=1)
        ),
        "spire": head(SPIRe, spire, TREE, ("rejection",), picks="distinct"),
        "redrafter": head(ReDrafter, ReDrafterConfig, trees.Beams(2, 2), **WIDE),
        "adaptive redrafter": adaptive(
            head(ReDrafter, ReDrafterConfig, trees.Beams(2, 3), recurrent=False, **WIDE)
        ),
        "tree top": (tree(), near, ("delta",)),
        "tree worst": (tree(sibling_sampling="worst"), near, ("rejection",)),
        "tree iid": (tree(sibling_sampling="iid"), near, (*ALL, "traversal")),
        "tree distinct": (tree(sibling_sampling="distinct"), near, (*ALL, "traversal")),
        "tree per row": (
            tree(sibling_sampling="iid", random_parents=True, topology=(-1, 0, 0, 0)),
            near,
            ("rejection",),
        ),
        "passengers": (tree(sibling_sampling="iid", passengers=(2,)), near, ("rejection",)),
        "silent": (tree(sibling_sampling="iid", silent_every=3), near, ("rejection",)),
    }
    return Cases(lines)
