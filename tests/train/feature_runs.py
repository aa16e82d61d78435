"""Recipes for heads on a target's features in shapes whose runs take seconds."""

from specjax.train import block, block_heads, config, dspark, eagle, eagle3, frozen, mtp, specdiff

SMALL = ["num_heads=2", "optimizer.warmup=2", "optimizer.decay_share=0.0", "run.save_every=20"]
SMALL += ["decoding.num_prompts=4", "decoding.batch=4", "decoding.new_tokens=8"]
SMALL += ["decoding.prompt_tokens=8", "run.eval_every=20", "run.steps=20"]
SMALL += ["report.texts=0", "report.plan_prompts=0"]
RECIPES = {
    "eagle3": ["layers=[0, 1]", "draft_vocab_size=40"],
    "narrow": ["layers=[0, 1]", "hidden_size=8", "head_dim=4", "intermediate_size=12"],
    "p-eagle": ["layers=[0, 1]", "draft_vocab_size=40", "parallel=true", "num_layers=2"],
    "dependent": ["layers=[0, 1]", "draft_vocab_size=40", "parallel=true", "dependency_size=6"],
    "eagle": ["top_k=4", "noise=0.1"],  # HASS's loss, and the noise
    "mtp": ["share_layers=false"],
    "block": ["layers=[1]", "num_layers=1", "num_anchors=6"],
    "jetspec": ["layers=[1]", "num_layers=1", "num_anchors=6", "causal=true"],
    "dspark": ["layers=[1]", "num_layers=1", "num_anchors=6", "markov=rnn", "markov_rank=3"],
    "specdiff": ["layers=[1]", "num_layers=1", "num_anchors=6", "masking=suffix"],
    "domino": ["layers=[1]", "num_layers=1", "num_anchors=6", "rank=3", "gru_size=5"],
    "xpress": ["layers=[1]", "num_layers=1", "num_anchors=6", "rank=3", "inner_size=4"],
}
RECIPES["xpress"] += ["kind=xpress", "rounds=2"]
LATTICE = ["num_candidates=30", "lattice_size=4", "lattice_heads=2", "factor_size=3"]
RECIPES["dflash2"] = ["kind=dflash2", "layers=[1]", "num_layers=1", "num_anchors=6", "rank=3"]
RECIPES["dflash2"] += ["num_candidates=9"]
RECIPES["lilicorr"] = ["kind=lilicorr", "layers=[1]", "num_layers=1", "num_anchors=6", *LATTICE]
MODULES = {"eagle3": eagle3, "narrow": eagle3, "p-eagle": eagle3, "eagle": eagle, "mtp": mtp}
MODULES["dependent"] = eagle3
BLOCKS = {"block": block, "dspark": dspark, "domino": block_heads, "xpress": block_heads}
BLOCKS |= {"lilicorr": block_heads, "dflash2": block_heads, "specdiff": specdiff, "jetspec": block}
MODULES |= BLOCKS


def setting_of(place, kind, *fields):
    root, _, teacher = place
    words = [f"data.corpus={root / 'corpus'}", "data.length=24", "data.batch=4", teacher]
    words += ["data.eval_rows=4", *SMALL, *fields]
    made = config.load(kind, root / "empty.toml", words)
    return made, frozen.make_setting(made, lambda count: getattr(made, "layers", ()))


def make(place, name):
    module = MODULES[name]
    made, setting = setting_of(place, module.Config, *RECIPES[name])
    return made, setting, getattr(module, f"make_{recipe_of(name)}")(made, setting)


def recipe_of(name):
    return MODULES[name].__name__.rpartition(".")[2]
