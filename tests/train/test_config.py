"""A configuration says exactly what will run, or is refused."""

import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest
from recipe_tables import model_table
from specjax.train import (
    block,
    block_heads,
    boost,
    compare,
    config,
    corpus,
    depth_width,
    distill,
    dspark,
    eagle,
    eagle3,
    features,
    heads,
    hydra,
    kangaroo,
    mtp,
    mtp_heads,
    objectives,
    online,
    packages,
    pass_embeddings,
    pretrain,
    probe,
    prompts,
    regenerate,
    reward,
    specdec,
    specdiff,
    speculator,
    spire,
    tokenizer,
    unlikelihood,
)
from specjax.train.cli import main, parser

from specjax import configs

SHAPE = model_table()
SHIPPED = {
    "embedded_corpus": corpus,
    "embedded_packages": packages,
    "embedded_tokenizer": tokenizer,
    "embedded_prompts": prompts,
    "embedded_target_base": pretrain,
    "embedded_target": unlikelihood,
    "embedded_early_exit": pretrain,
    "embedded_early_exit_twin": pretrain,
    "deep_early_exit": pretrain,
    "deep_early_exit_twin": pretrain,
    "embedded_samples": regenerate,
    "embedded_samples_more": regenerate,
    "embedded_eval_greedy": regenerate,
    "embedded_eval_sampled": regenerate,
    "embedded_draft": distill,
    "embedded_objectives": objectives,
    "embedded_depth_width": depth_width,
    "embedded_online": online,
    "embedded_probe": probe,
    "embedded_reward": reward,
    "embedded_boost": boost,
    "embedded_features": features,
    "embedded_blockwise": heads,
    "embedded_medusa": heads,
    "embedded_hydra": hydra,
    "embedded_eagle": eagle,
    "embedded_hass": eagle,
    "embedded_kangaroo": kangaroo,
    "embedded_eagle3_base": eagle3,
    "embedded_eagle3": eagle3,
    "embedded_peagle": eagle3,
    "embedded_mtp": mtp,
    "embedded_block": block,
    "embedded_dspark": dspark,
    "embedded_domino": block_heads,
    "embedded_xpress": block_heads,
    "embedded_dflash2": block_heads,
    "embedded_lilicorr": block_heads,
    "embedded_specdec": specdec,
    "embedded_specdiff": specdiff,
    "embedded_mtp_heads": mtp_heads,
    "embedded_pass": pass_embeddings,
    "embedded_compare": compare,
    "embedded_speculator": speculator,
    "embedded_spire": spire,
    "other_tokenizer": tokenizer,
    "other_draft": pretrain,
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(SHAPE)
    return path


def test_every_shipped_config_fills_its_recipe():
    assert set(configs.names()) == set(SHIPPED)
    for name, recipe in SHIPPED.items():
        assert isinstance(config.load(recipe.Config, configs.find(name)), recipe.Config)


DOCS = Path(__file__).parents[2]
PAGES = [DOCS / "README.md", *sorted((DOCS / "docs").rglob("*.md"))]
TRAINING = DOCS / "docs" / "training.md"


def as_a_shell_reads(text):
    """The words of a line, without its comment; raises for a list that the shell would expand."""
    bare = re.sub(r"'[^']*'", "", text.partition("  #")[0])
    assert "[" not in bare, f"quote the list in {text}"
    return shlex.split(text, comments=True)


def test_every_training_command_of_the_documentation_loads(tmp_path):
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    training = TRAINING.read_text(encoding="utf-8")
    mine = tmp_path / "my.toml"
    (block,) = re.findall(r"```toml\n(.*?)```.*?--config my\.toml", training, re.DOTALL)[:1]
    mine.write_text(block)
    commands = re.findall(r"^specjax train .*", text.replace("\\\n", ""), re.MULTILINE)
    commands += re.findall(r"`(specjax train \S+ --config .*?)`", text)
    commands = [command for command in commands if not {"--help", "RECIPE"} & {*command.split()}]
    assert len(commands) >= 15
    for command in commands:
        given = parser().parse_intermixed_args(as_a_shell_reads(command)[2:])
        recipe = importlib.import_module(f"specjax.train.{given.recipe}")
        file = mine if given.config == "my.toml" else given.config and configs.find(given.config)
        config.load(recipe.Config, file, given.fields)
    assert sum("my.toml" in command for command in commands) >= 3


def test_lists_that_are_shown_as_words_survive_a_shell():
    texts = re.findall(r"`'?[a-z_.]+=\[.*?`", TRAINING.read_text(encoding="utf-8"))
    for name in configs.names():
        lines = configs.find(name).read_text().splitlines()
        texts += [line.strip("# ") for line in lines if re.match(r"#.*[a-z]=\[", line)]
    assert len(texts) >= 4
    for text in texts:
        assert as_a_shell_reads(text.strip("`").partition("`")[0])


def test_words_override_fields_with_toml_values_or_bare_strings(file):
    words = ["run.steps=7", "data.corpus=/some/folder", "data.strict=false", "optimizer.rate=1"]
    made = config.load(pretrain.Config, file, words)
    assert (made.run.steps, made.data.corpus, made.data.strict) == (7, "/some/folder", False)
    assert made.optimizer.rate == 1.0 and isinstance(made.optimizer.rate, float)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "run.stepz=7",
            "field run.stepz; did you mean run.steps. known fields of run.: folder, steps",
        ),
        ("runs.steps=7", "unknown field runs"),
        ("run.steps=many", "run.steps='many' is of type str, expected int"),
        ("run.steps=1.5", "run.steps=1.5 is of type float, expected int"),
        ("data.strict=1", "data.strict=1 is of type int, expected bool"),
        ("run.steps", "not of the form field=value"),
        ("run=3", "run=3 should be a section"),
        ("run.steps=0", "run.steps=0; accepted: at least 1"),
        ("run.steps=3000000000", r"run.steps=3000000000; accepted: .* below 2\*\*31"),
        ("run.seed=-1", "run.seed=-1; accepted: 0 to"),
        ("data.eval_rows=0", "data.eval_rows=0; accepted: at least 1"),
        ("optimizer.rate=nan", "optimizer.rate=nan; accepted: above 0"),
        ("optimizer.warmup=-3", "optimizer.warmup=-3; accepted: at least 0"),
        ("optimizer.name=sgd", "optimizer.name='sgd'; accepted: muon or adamw"),
        ("data.samples=3", r"data.samples=3 is of type int, expected a list"),
        ("data.samples=[3]", r"data.samples\[0\]=3 is of type int, expected str"),
        ("run.folder=", r"run.folder=''; accepted: a name that is not empty \('.': this folder\)"),
        ("data.corpus=", "data.corpus=''; accepted: a name that is not empty"),
        ('data.mixed=["a", ""]', r"data.mixed\[1\]=''; accepted: a name that is not empty"),
        ("data.length=1025", "data.length=1025: the model reads up to model.max_positions=1024"),
        ('data.mixed=["a/x.txt", "b/x.txt"]', "data.mixed=.*not a/x.txt and b/x.txt"),
        ("data.samples_share=[0.5]", "accepted: 0 positive shares, one for each of data.samples"),
        ("data={samples=['a.npz'],samples_share=[1.1]}", "sum to 1.1; accepted: a sum of at most"),
        (
            "data={samples=['a.npz'],samples_share=[0.1,0.2]}",
            r"accepted: 1 positive shares.*, for example data.samples_share=\[0.4\]",
        ),
    ],
)
def test_a_bad_word_is_refused_with_what_is_accepted(file, word, message):
    with pytest.raises(config.ConfigError, match=message):
        config.load(pretrain.Config, file, [word])


def test_files_without_shares_get_the_same_as_the_corpus():
    made = config.DataConfig(samples=("a", "b"), mixed=("c",))
    assert made.samples_share == (0.25, 0.25) and made.mixed_share == (0.25,)
    made = config.DataConfig(samples=("a",), mixed=("c",), mixed_share=(0.5,))
    assert made.samples_share == (0.25,) and made.mixed_share == (0.5,)
    assert config.DataConfig(samples=("a",), samples_share=(1.0,)).samples_share == (1.0,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decoding.num_prompts=0", 'decoding.files=["a.jsonl"]'], "measures no decoding.files"),
        (['decoding.files=["a/x.jsonl", "y.jsonl", "b/x.jsonl"]'], "not a/x.jsonl and b/x.jsonl"),
        (['eval_samples=["a/x.npz", "b/x.npz"]'], "eval_samples=.*not a/x.npz and b/x.npz"),
    ],
)
def test_files_that_would_not_be_measured_apart_are_refused(words, message):
    with pytest.raises(config.ConfigError, match=message):
        config.load(heads.Config, None, words)


def test_a_draft_model_and_a_target_that_goes_on_are_checked_as_a_new_target_is(file):
    with pytest.raises(config.ConfigError, match="data.length=99: .* model.max_positions=98"):
        config.load(distill.Config, file, ["data.length=99", "model.max_positions=98"])
    with pytest.raises(config.ConfigError, match="data.mixed=.*not a/x.txt and b/x.txt"):
        config.load(unlikelihood.Config, None, ['data.mixed=["a/x.txt", "b/x.txt"]'])


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (heads, ["trunk_size=8"], "trunk_size=8: kind=medusa does not read it; leave trunk_size"),
        (heads, ["kind=blockwise", "tied=false"], "tied=false: kind=blockwise .* give kind=medusa"),
        (
            speculator,
            ["kind=lstm", "beams=2"],
            "beams=2: kind=lstm does not .* give kind=redrafter",
        ),
        (
            heads,
            ["sample_head=true", "decay=0.5"],
            "decay=0.5: with sample_head=true .* weigh the same; .* give sample_head=false",
        ),
        *(
            (speculator, ["kind=redrafter", word], f"{word}: kind=redrafter .* give kind=mlp, or")
            for word in ("inner_size=8", "tied=false", "scaled=false")
        ),
        (dspark, ["confidence_weight=0", "scaled_for=greedy"], "scaled_for='greedy': with conf"),
        (distill, ["temperature=2"], "temperature=2.0: with on_policy=0 the drafter writes no"),
        (distill, ["beta=0.4"], "beta=0.4: divergence=fkl does not read it; .* divergence=jsd"),
    ],
)
def test_settings_that_another_one_makes_useless_are_refused(file, recipe, words, message):
    with pytest.raises(config.ConfigError, match=message):
        made = config.load(recipe.Config, file if recipe is distill else None, words)
        recipe.run(made)


def test_a_missing_field_and_broken_toml_are_refused(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[model]\nhidden_size = 16\n")
    with pytest.raises(config.ConfigError, match="missing field model.intermediate_size"):
        config.load(pretrain.Config, path)
    path.write_text("[model\n")
    with pytest.raises(config.ConfigError, match="bad.toml is not TOML"):
        config.load(pretrain.Config, path)


def test_an_unknown_config_name_lists_the_known_ones(capsys):
    assert main(["pretrain", "--config", "nowhere"]) == 2
    assert "Known are deep_early_exit" in capsys.readouterr().err


def test_a_file_of_another_recipe_is_refused_with_the_one_that_it_is_of(capsys):
    assert main(["eagle3", "--config", "embedded_speculator"]) == 2
    said = capsys.readouterr().err
    assert "is a configuration of the recipe speculator" in said
    assert "not of eagle3 (unknown" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["corpus", "run.mesh=data=2"], "run.mesh: the recipe corpus has no use for it"),
        (["specdec", "run.remat=true"], "run.remat=true: the recipe specdec recomputes no layer"),
        (["features", "--processes", "localhost:1", "2", "0"], "features runs in one process"),
        (
            ["eagle3", "--processes", "localhost:1", "2", "two"],
            "COUNT and INDEX must be whole numbers",
        ),
        (["eagle3", "--processes", "localhost:1", "2", "2"], "the index must be in"),
    ],
)
def test_devices_that_a_recipe_would_not_use_are_refused(capsys, words, message):
    assert main(words) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["eagle3", "regenerate", "boost"])
def test_a_folder_that_cannot_be_made_is_refused_before_any_work(tmp_path, capsys, recipe):
    (tmp_path / "file").write_text("")
    field = {"regenerate": "output", "boost": "distill.run.folder"}.get(recipe, "run.folder")
    words = [recipe, f"{field}={tmp_path / 'file' / 'run' / 'x'}", "teacher=nowhere"]
    words[2:] = [] if recipe == "boost" else words[2:]
    words += ["--config", "embedded_boost"] if recipe == "boost" else []
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{field}: the folder" in said and "cannot be written to (Not a directory)" in said


def test_of_several_processes_the_first_alone_checks_the_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = ["eagle3", f"run.folder={tmp_path / 'file' / 'x'}", "--processes", "localhost:1"]
    for index, said in (("0", "run.folder: the folder"), ("two", "COUNT and INDEX must be whole")):
        assert main([*words, "2", index]) == 2 and said in capsys.readouterr().err


def test_the_command_alone_prints_the_help(capsys):
    assert main([]) == 0
    assert "specjax train RECIPE --help lists the fields" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["boost", "objectives"])
def test_the_run_of_a_recipe_within_another_is_given_there_or_refused(capsys, recipe):
    words = [recipe, "--config", f"embedded_{recipe}", "run.steps=3"]
    assert main(words) == 2 and "unknown field run; known fields" in capsys.readouterr().err


def test_a_target_is_not_said_to_have_read_samples_that_it_passes_over(file):
    words = ["data.samples=['s.npz']", "data.samples_share=[0.5]"]
    with pytest.raises(config.ConfigError, match=r"data.samples=\['s.npz'\]: a target learns from"):
        config.load(pretrain.Config, file, words)


def test_an_unknown_divergence_is_refused_with_the_known_ones(file):
    with pytest.raises(config.ConfigError, match="known: fkl, rkl, jsd, tvd, nla"):
        config.load(distill.Config, file, ["divergence=kl"])


def test_differences_name_the_fields_that_change_what_was_computed(file):
    made = config.load(pretrain.Config, file)
    old = config.flatten(made)
    longer = dataclasses.replace(made, run=dataclasses.replace(made.run, steps=9, save_every=1))
    assert config.differences(old, config.flatten(longer)) == []
    other = dataclasses.replace(made, data=dataclasses.replace(made.data, batch=3))
    assert config.differences(old, config.flatten(other)) == ["data.batch: 16 -> 3"]
