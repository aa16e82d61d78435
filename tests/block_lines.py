"""Lines of the registry for drafters of whole blocks: passes over masks, and heads above them."""

import functools

from combinations import adaptive

from specjax import trees
from specjax.drafters.block import BlockConfig, BlockDrafter
from specjax.drafters.dflash2 import DFlash2, DFlash2Config
from specjax.drafters.domino import Domino, DominoConfig
from specjax.drafters.dspark import DSpark, DSparkConfig
from specjax.drafters.lilicorr import LiLiCorr, LiLiCorrConfig
from specjax.drafters.specdec import SpecDec, SpecDecConfig
from specjax.drafters.specdiff import SpecDiff
from specjax.drafters.xpress import XPress, XPressConfig
from specjax.models.seq2seq.config import EncoderDecoderConfig


def block_lines(head, layers, vocab_size):
    """The lines for a target with ``vocab_size`` tokens: ``head`` is that of ``registry.cases``,
    and ``layers`` configure the decoder layers that pass over a block."""

    def specdec(hidden_size, vocab_size):
        sizes = dict(hidden_size=8, intermediate_size=8, num_encoder_layers=2, num_layers=1)
        network = EncoderDecoderConfig(
            vocab_size=vocab_size, **sizes, num_heads=2, head_dim=4, num_buckets=8, max_distance=20
        )
        return SpecDecConfig(network=network, num_heads=3, mask_token=0, source=5)

    def block(hidden_size, vocab_size):
        return BlockConfig(layers=layers, block_size=4, mask_token=0, target_layers=(1,))

    def dspark(hidden_size, vocab_size, **shape):
        common = dict(layers=layers, block_size=3, mask_token=0, target_layers=(1,))
        return DSparkConfig(markov_rank=3, **common, **shape)

    def domino(hidden_size, vocab_size):
        common = dict(layers=layers, block_size=3, mask_token=0, target_layers=(1,))
        return DominoConfig(gru_size=3, rank=3, **common)

    def xpress(hidden_size, vocab_size):
        common = dict(layers=layers, block_size=4, mask_token=0, target_layers=(1,))
        return XPressConfig(rank=3, inner_size=4, num_passes=2, **common)

    def lilicorr(hidden_size, vocab_size):
        common = dict(layers=layers, block_size=4, mask_token=0, target_layers=(1,))
        sizes = dict(lattice_size=4, lattice_layers=1, lattice_heads=2, factor_size=3)
        return LiLiCorrConfig(num_candidates=2, logit_scale=60.0, **common, **sizes)

    def dflash2(hidden_size, vocab_size):
        common = dict(layers=layers, block_size=4, mask_token=0, target_layers=(1,))
        sizes = dict(conv_group=hidden_size // 2, selector_rank=3, num_candidates=2)
        return DFlash2Config(**common, **sizes)

    fewer = dict(draft_vocab_size=vocab_size - 1)
    at_once = functools.partial(XPress, in_turn=False)
    twice = functools.partial(SpecDiff, steps=2)
    rising = functools.partial(SpecDiff, steps=2, schedule="cosine")
    surest = functools.partial(SpecDiff, steps=2, order="confidence")
    return {
        "block": head(BlockDrafter, block, (-1, 0, 0, 1), ("rejection",), picks="iid"),
        "block expanded": head(BlockDrafter, block, trees.Expand(3, 3, 7)),
        "specdiff": head(twice, block, (-1, 0, 1, 2), ("rejection", "block"), picks="iid"),
        "specdiff tree": head(rising, block, (-1, 0, 0, 1, 2, 4), ("rejection",), picks="distinct"),
        "specdiff confidence": head(surest, block, (-1, 0, 1, 2), ("delta", "coupled")),
        "adaptive specdiff": adaptive(
            head(rising, block, (-1, 0, 1, 2), ("rejection",), picks="iid")
        ),
        "specdec": head(SpecDec, specdec, (-1, 0, 1, 1, 2), ("rejection",), picks="iid", layer=0),
        "dflash2": head(DFlash2, dflash2, (-1, 0, 0, 1), ("rejection",), picks="iid"),
        "domino": head(Domino, domino, (-1, 0, 0, 1), ("rejection",), picks="iid"),
        "xpress": head(at_once, xpress, (-1, 0, 0, 1), ("rejection",), picks="iid"),
        "xpress in turn": head(XPress, xpress, (-1, 0, 0, 1), ("rejection",), picks="iid"),
        "lilicorr": head(LiLiCorr, lilicorr, (-1, 0, 0, 1), ("rejection",), picks="iid"),
        "dspark": head(DSpark, dspark, (-1, 0, 1, 2), ("rejection",), picks="iid", markov="rnn"),
        "dspark few words": head(
            DSpark, dspark, (-1, 0, 0, 1), ("rejection",), picks="iid", **fewer
        ),
    }
