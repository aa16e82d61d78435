"""The audit: silent about sound rules and samples, and it finds what is planted."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_acceptance import LAWFUL, AfreshForEveryPath, Misread
from test_sampled_faults import DeltaAtAnotherTemperature
from test_sampled_faults import WrongBonus as BonusZero
from toys import bag

import specjax
from specjax import Sampling, trees
from specjax.acceptance import RULES, node_laws, walk
from specjax.acceptance.coupled import Coupled
from specjax.analysis import sampled_law
from specjax.cli import audit as command
from specjax.decoding import reference
from specjax.sampling import drawing
from specjax.types import Rule

SOUND = [name for name, rule in RULES.items() if rule.lossless and name != "greedy"]
ENUMERATED = [name for name in SOUND if RULES[name].noise is None]


@pytest.mark.parametrize("name", ENUMERATED)
def test_a_sound_rule_is_exact_on_every_draft_that_it_admits(name):
    report = specjax.audit_rule(name, laws=1)
    shapes = {f.what.partition(",")[0] for f in report.findings if not f.samples}
    sampled = {f.what.partition(",")[0] for f in report.findings if f.samples}
    assert not report.biased and shapes == sampled and "; sampled: no deviation" in str(report)
    assert str(report).endswith("; larger drafts were not looked at")
    assert len(shapes) == {"block": 2, "hub": 2}.get(name, 4)
    assert bool(report.refused) == (name in ("block", "kseq", "hub"))


@pytest.mark.parametrize("name", [name for name in SOUND if name not in ENUMERATED])
def test_a_sound_rule_that_shares_its_noise_is_sampled_and_nothing_is_found(name):
    report = specjax.audit_rule(name)
    assert not report.biased and all(f.samples > 190_000 for f in report.findings)
    assert max(f.variation for f in report.findings) < 0.02  # what would have been found
    assert "no deviation above TV 0.0" in str(report)


class Flat(Misread, Rule):
    """A rule of one's own that reads a law a little too flat."""

    name, lossless = "flat", True

    def check(self, draft, greedy):
        if draft.topology != (-1, 0, 0) or draft.laws is None:
            raise ValueError("rule='flat' judges pairs that were drawn")


@dataclasses.dataclass(frozen=True)
class Reused(Rule):
    """A rule with uniforms of its own (it cannot be enumerated) that draws again from all of p."""

    name, lossless = "reused", True

    def check(self, draft, greedy):
        if draft.topology != (-1, 0, 1, 2):
            raise ValueError("rule='reused' judges chains")

    def __call__(self, params, draft, target_law, draft_law, key):
        def said(node):
            chosen = jax.vmap(jax.random.fold_in)(key, node)
            return jax.vmap(jax.random.categorical)(chosen, jnp.log(target_law(node)))

        def again(node):  # the first token of each path gets a second chance
            one, two = said(node), said(node + 100)
            child = jnp.any((draft.tokens == one[:, None]) & (node[:, None] == 0), axis=1)
            return jnp.where(child, one, two).astype(jnp.int32)

        return walk.verdict(draft, *walk.follow(draft, again))


@pytest.mark.parametrize(
    "rule",
    [AfreshForEveryPath(), Flat(RULES["rejection"], "target"), Flat(RULES["traversal"], "draft")],
    ids=["afresh", "flat p", "flat q"],
)
def test_fault_an_enumerated_rule_that_is_biased_is_found(rule):
    report = specjax.audit_rule(rule, laws=1)
    assert report.biased and "BIASED: TV 0." in str(report)


def test_fault_a_sampled_rule_that_is_biased_is_found():
    report = specjax.audit_rule(Reused(), samples=50_000)
    found = [finding for finding in report.findings if finding.biased]
    assert found and max(f.variation for f in found) > 0.01 and found[0].samples > 49_000
    assert re.search(r"verdict: biased: TV at least 0\.[1-9]", str(report))


@dataclasses.dataclass(frozen=True)
class WrongBonus(Coupled):
    """Shares its noise, and says token 0 after a chain that was accepted whole."""

    name = "wrong bonus"

    def check(self, draft, greedy):
        if draft.num_nodes > 1 and draft.topology != trees.chain_parents(3):
            raise ValueError("rule='wrong bonus' judges chains of 3")

    def __call__(self, params, draft, target_law, draft_law, key):
        found = super().__call__(params, draft, target_law, draft_law, key)
        whole = (found.count == draft.num_nodes - 1) & (draft.num_nodes > 1)
        return dataclasses.replace(found, token=jnp.where(whole, 0, found.token))


class DeepFault(type(RULES["rejection"])):
    """Says token 0 after six accepted tokens, beyond the shapes that every audit has."""

    name = "deep fault"

    def check(self, draft, greedy):
        if draft.topology != trees.chain_parents(8):
            raise ValueError("rule='deep fault' judges chains of 8")

    def __call__(self, params, draft, target_law, draft_law, key):
        found = super().__call__(params, draft, target_law, draft_law, key)
        return dataclasses.replace(found, token=jnp.where(found.count >= 6, 0, found.token))


def test_fault_a_bias_of_a_deep_chain_is_found_on_a_shape_that_is_added():
    with pytest.raises(ValueError, match="admits none"):
        specjax.audit_rule(DeepFault())
    report = specjax.audit_rule(DeepFault(), shapes=["chain:8"], samples=20_000)
    assert report.biased and [f.what for f in report.findings] == [
        "chain:8, drawn iid, with random keys"
    ]
    with pytest.raises(ValueError, match="shapes='chain:11': give a tree .* 1 to 10 drafted"):
        specjax.audit_rule(DeepFault(), shapes=["chain:11"])


def test_fault_a_wrong_token_after_a_chain_that_was_accepted_whole_is_found():
    report = specjax.audit_rule(WrongBonus(), samples=20_000)
    assert [(f.what, f.biased) for f in report.findings] == [("a chain of 3, drawn iid", True)]


@dataclasses.dataclass(frozen=True)
class First(Rule):
    """Judges the first token of a chain of 3; a mistake may be planted."""

    mistake: str = ""
    name, lossless = "first", True

    def check(self, draft, greedy):
        if draft.topology != (-1, 0, 1, 2):
            raise ValueError("rule='first' judges chains of 3")

    def __call__(self, params, draft, target_law, draft_law, key):
        root = jnp.zeros((draft.tokens.shape[0],), jnp.int32)
        uniform = drawing.uniforms(key, draft.num_nodes)
        p, q = target_law(root), draft_law(root + 1)
        if self.mistake == "trusts q" and draft.laws is None:
            q = jnp.full_like(p, 1 / p.shape[1])
        able = walk.eligible(draft)[:, 1] | (self.mistake == "accepts passengers")
        x = draft.tokens[:, 1:2]
        p_x, q_x = (jnp.take_along_axis(law, x, axis=1)[:, 0] for law in (p, q))
        accepted = able & (uniform[:, 1] * q_x < p_x)
        left = jnp.where(able[:, None], jnp.maximum(p - q, 0), p)
        left = jnp.where(accepted[:, None], target_law(root + 1), left)
        last = drawing.draw(left, uniform[:, int(self.mistake == "uses a uniform twice")])
        return walk.verdict(draft, jnp.where(accepted, root + 1, root), last)


@pytest.mark.parametrize(
    ("mistake", "seen"),
    [
        ("", ()),
        (
            "uses a uniform twice",
            (
                "a chain of 3, drawn iid, with random keys",
                "a chain of 3, point masses, with random keys",
                "a chain of 3, drawn iid, with passengers, with random keys",
            ),
        ),
        ("trusts q", ("a chain of 3, point masses",)),
        ("accepts passengers", ("a chain of 3, drawn iid, with passengers",)),
    ],
)
def test_fault_of_a_rule_is_seen_on_the_drafts_that_show_it(mistake, seen):
    report = specjax.audit_rule(First(mistake), laws=1, samples=50_000)
    assert {f.what for f in report.findings if f.biased} == set(seen), str(report)


@pytest.mark.parametrize("name", ["approximate-typical", "approximate-lenience:scale=0.9"])
def test_an_approximate_rule_is_called_biased(name):
    assert specjax.audit_rule(name, laws=1, samples=20_000).biased


@dataclasses.dataclass(frozen=True)
class Told(Rule):
    """A rule that is told something false of its drafts."""

    rule: object
    lie: str
    name, lossless = "told", True

    def check(self, draft, greedy):
        drawn = "distinct" if self.lie == "independent" else "iid"
        if draft.topology != (-1, 0, 0) or draft.laws is None or draft.draws != drawn:
            raise ValueError("rule='told' judges pairs that were drawn in its way")

    def __call__(self, params, draft, target_law, draft_law, key):
        if self.lie == "independent":
            draft = dataclasses.replace(draft, draws="iid")
        else:  # a token that was drawn twice is there once
            twin = draft.tokens[:, 2] == draft.tokens[:, 1]
            there = jnp.stack([jnp.ones_like(twin), jnp.ones_like(twin), ~twin], axis=1)
            draft = dataclasses.replace(draft, candidate=there)
        draft_law = node_laws.DraftLaw(draft, draft.laws.shape[-1])
        return self.rule(params, draft, target_law, draft_law, key)


class MisreadAsNamed(Misread, Rule):
    """A rule that reads a law a little too flat, on the drafts that the rule itself admits."""

    lossless = True

    @property
    def name(self):
        return f"misread {self.rule.name}"

    def check(self, draft, greedy):
        if draft.laws is None:
            raise ValueError("it judges drafts that were drawn")
        self.rule.check(draft, greedy)


WRONG = {
    **{
        f"{name} of a flat law of the {whose}": MisreadAsNamed(RULES[name], whose)
        for name, _ in LAWFUL
        for whose in ("target", "draft")
    },
    **{
        f"{name} told {lie}": Told(RULES[name], lie)
        for name in ("rejection", "traversal")
        for lie in ("independent", "once")
    },
    "delta of a flat law": DeltaAtAnotherTemperature(),
    "a wrong bonus": BonusZero(),
}


@pytest.mark.parametrize("rule", WRONG.values(), ids=WRONG)
def test_each_wrong_rule_of_the_other_tests_is_called_biased(rule):
    """With the samples that the audit takes by itself."""
    assert specjax.audit_rule(rule).biased


# ------------------------------------------------------------------ samples of another engine

MODEL, PARAMS = bag(11, 3)
LM = specjax.LM.of(MODEL, PARAMS)
SHORT = specjax.LM.of(MODEL, PARAMS, max_positions=64)
PROMPTS = [(1, 2), (3,), (4, 5, 6, 0)]


def engine(rows, num, temperature=1.0, mistake=None, seed=0):
    """Samples of plain decoding by whole passes, and with a mistake."""
    random, found = np.random.default_rng(seed), []
    for prompt in PROMPTS:
        tokens = np.tile(np.asarray(prompt, np.int32), (rows, 1))
        for step in range(num):
            width = tokens.shape[1]
            padded = np.pad(tokens, ((0, 0), (0, 16 - width)))
            logits = np.asarray(reference.logits(MODEL, PARAMS, jnp.asarray(padded)))[:, width - 1]
            p = np.exp(logits / temperature)
            p /= p.sum(axis=1, keepdims=True)
            u = random.random(rows)
            if mistake == "paired" and step:  # the same noise for two tokens in a row
                u = last  # noqa: F821
            last = u  # noqa: F841
            drawn = (p.cumsum(axis=1) < u[:, None]).sum(axis=1)
            tokens = np.concatenate([tokens, np.minimum(drawn, 10)[:, None]], axis=1)
        found += [(prompt, row[len(prompt) :].tolist()) for row in tokens.astype(np.int32)]
    return found


def test_samples_of_a_sound_engine_are_found_to_be_nothing_else():
    report = specjax.audit_samples(LM, engine(600, 5))
    assert not report.biased and len(report.findings) == 3
    assert all(f.p_value > 1e-3 and f.variation < 0.2 for f in report.findings)


def test_fault_samples_at_another_temperature_or_of_noise_used_twice():
    sharp = specjax.audit_samples(LM, engine(600, 5, temperature=0.8))
    assert sharp.biased and sharp.findings[0].biased and sharp.findings[0].variation > 0
    paired = specjax.audit_samples(LM, engine(600, 5, mistake="paired"))
    assert paired.findings[1].biased


def test_a_greedy_engine_is_held_token_by_token():
    cold = Sampling(temperature=0.0)
    right = [(p, reference.greedy(MODEL, PARAMS, p, 6)) for p in PROMPTS]
    assert not specjax.audit_samples(LM, right, sampling=cold).biased
    wrong = [(p, [*new[:-1], (new[-1] + 1) % 11]) for p, new in right]
    report = specjax.audit_samples(LM, wrong, sampling=cold)
    assert report.biased and "3 of 18 tokens are not the model's most probable" in str(report)


def test_what_is_stated_of_false_alarms_power_and_bounds_holds():
    random, law = np.random.default_rng(0), np.asarray([0.4, 0.3, 0.2, 0.1])
    sound = [sampled_law.judge(random.multinomial(5000, law), law) for _ in range(2000)]
    assert sum(not e.fits(0.01) for e in sound) < 45  # 20 on average
    assert all(e.least(1e-3) == 0 for e in sound)
    edge = sound[0].resolution(0.01, 0.99)
    other = law + edge * np.asarray([0.5, 0.5, -0.5, -0.5])
    off = [sampled_law.judge(random.multinomial(5000, other), law) for _ in range(500)]
    assert sum(e.fits(0.01) for e in off) < 15  # 5 on average
    assert all(e.least(1e-3) <= edge for e in off)
    rare = sampled_law.judge(np.eye(10_000, dtype=int)[0] * 4000, np.full(10_000, 1e-4))
    assert rare.fits(1e-3) and rare.resolution(1e-3) == 1  # all outcomes share one cell
    nothing = sampled_law.judge(np.asarray([10, 0, 5]), np.asarray([1.0, 0.0, 0.0]))
    assert nothing.impossible == 5 and not nothing.fits(1e-12)


def test_the_command_says_what_it_found_by_its_exit_code(tmp_path, capsys):
    from specjax.cli.commands import parser

    def run(*words):
        return command.run(parser().parse_args(["audit", *words]))

    assert run("hub") == 0 and "exact on 2 siblings, a tree of 5 if" in capsys.readouterr().out
    assert run("approximate-lenience:scale=0.5", "--num-samples", "2000") == 1
    assert "biased" in capsys.readouterr().out
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps({"prompt": [1], "tokens": [2]}) + "\n" + '{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="line 2: give"):
        command.read_samples(path)
    path.write_text(json.dumps({"prompt": [1.5], "tokens": [2]}))
    with pytest.raises(ValueError, match="line 1: give"):
        command.read_samples(path)


def audited(*words):
    from specjax.cli.commands import parser

    return command.run(parser().parse_args(["audit", *words]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: specjax.audit_rule("auto"), "stands for other rules"),
        (lambda: specjax.audit_rule("nonsense"), "unknown"),
        (lambda: specjax.audit_rule("delta", samples=1), "samples=1: give at least 1000"),
        (lambda: specjax.audit_rule("delta", shapes=["40x40"]), "shapes='40x40': give a tree"),
        (lambda: specjax.audit_rule("delta", false_alarm=2), "false_alarm=2: it must be between"),
        (lambda: specjax.audit_rule("greedy"), "admits none"),
        (lambda: specjax.audit_samples(LM, [((1,), (2,))]), "1 tokens are too few"),
        (lambda: specjax.audit_samples(LM, [((1,), (11,) * 300)]), "of another tokenizer"),
        (lambda: specjax.audit_samples(LM, [("x", (1,) * 300)]), "no tokenizer"),
        (lambda: specjax.audit_samples(LM, [((1,), (1,) * 300), ((), (2,))]), "sample 2: .*empty"),
        (lambda: specjax.audit_samples(LM, [((11,), (1,) * 300)]), "prompt has the token id 11"),
        (lambda: specjax.audit_samples(LM, [((-1,), (1,) * 300)]), "0 to 10: .*another tokenizer"),
        (lambda: specjax.audit_samples(LM, [((1,), (1.5,) * 300)]), "sample 1: 1.5 is no whole"),
        (lambda: specjax.audit_samples(SHORT, [((1,), (1,) * 64)] * 9), "are 65 tokens, .*has 64"),
        (lambda: specjax.audit_samples(LM, [], false_alarm=2), "false_alarm"),
        (
            lambda: specjax.audit_samples(LM, [], sampling=Sampling(repetition_penalty=1.2)),
            "depend on earlier tokens",
        ),
        (lambda: specjax.audit_rule("nowhere:rule"), "module:Object"),
        (lambda: audited("delta", "--num-samples", "9"), "num_samples=9: give at least 1000"),
        (lambda: audited("delta", "--shape", "40x40"), "shape='40x40': give a tree"),
    ],
)
def test_what_cannot_be_audited_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
