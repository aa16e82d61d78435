"""Runs of recipes that take seconds: the shape of their target, and the fields of a run."""

SHAPE = ["model.intermediate_size=16", "model.num_layers=1", "model.num_heads=2"]
SHAPE += ["model.num_kv_heads=1", "model.head_dim=8"]


def three_layers(root, train):
    """The folder of a target of three layers that the recipe ``pretrain`` has made."""
    folder = root / "three"
    if not folder.exists():
        shape = [word for word in SHAPE if "num_layers" not in word]
        fields = [f"run.folder={folder}", "run.steps=60", "optimizer.warmup=4"]
        fields += ["optimizer.adam_rate=0.05", "model.hidden_size=16", "model.num_layers=3"]
        assert train("pretrain", *fields, *shape) == 0
    return folder / "model"


def brief(folder):
    """The fields of 20 steps of a recipe for heads, with a short evaluation at their end."""
    fields = ["optimizer.warmup=2", "optimizer.decay_share=0.0", "run.save_every=20"]
    fields += ["decoding.num_prompts=4", "decoding.batch=4", "decoding.new_tokens=8"]
    fields += ["decoding.prompt_tokens=8", "run.eval_every=20", "run.steps=20"]
    return [*fields, "report.texts=0", "report.plan_prompts=0", f"run.folder={folder}"]
