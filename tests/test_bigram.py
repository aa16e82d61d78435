"""Tables of n-grams: what plain Python counts is counted, and what is counted drafts."""

import collections
import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import MODEL, PARAMS, PROMPTS, VOCAB, pad
from starts import unanswered
from toys import bag, counted

import specjax
from specjax import trees
from specjax.cli import main as command
from specjax.decoding import round
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Bigram, Cascade, DraftModel, Fallback, Hybrid, NGram, bigram
from specjax.text import drafter_names

LETTERS = 5


def corpus(seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, LETTERS, random.integers(1, 60)).tolist() for _ in range(30)]


def said(texts, last, least):
    """The most frequent successor of the longest end of ``last`` that ``texts`` have."""
    for size in range(len(last), 0, -1):
        counts = collections.Counter()
        for text in texts:
            for i in range(len(text) - size):
                if text[i : i + size] == last[-size:]:
                    counts[text[i + size]] += 1
        often = {x: n for x, n in counts.items() if n >= (least if size > 1 else 1)}
        if often:
            return min(often, key=lambda x: (-often[x], x))
    return -1


def wrong_successors(tables, order, least):
    """For how many contexts the tables say another successor than ``said``."""
    texts = corpus()
    contexts = [*itertools.product(range(LETTERS + 1), repeat=order - 1)]
    found = jax.jit(bigram.successor)(tables, jnp.asarray(contexts))
    wanted = [said(texts, list(last), least) for last in contexts]
    return sum(int(a) != b for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("order", "least"), [(2, 1), (3, 1), (4, 3)])
def test_the_longest_context_that_was_counted_decides(order, least):
    tables = bigram.count(corpus(), LETTERS + 1, order, least=least)
    assert wrong_successors(tables, order, least) == 0


def test_fault_a_context_that_reaches_over_the_end_of_a_text():
    joined = [list(itertools.chain(*corpus()))]
    assert wrong_successors(bigram.count(joined, LETTERS + 1, 3, least=1), 3, 1) > 0


def test_of_many_contexts_the_most_frequent_are_kept():
    tables = bigram.count(corpus(), LETTERS, 3, least=1, most=4)
    assert tables["contexts.2"].shape == (4, 2) and tables["after.2"].shape == (4,)
    (few,) = [bigram.count([[0, 1, 2]], 4, 3)]  # nothing occurs twice
    assert few["contexts.2"].tolist() == [[-1, -1]] and few["after.1"].tolist() == [1, 2, -1, -1]


@pytest.mark.parametrize("order", [2, 3])
def test_a_draft_follows_the_table_up_to_a_token_without_successor(order):
    tables = counted(VOCAB, order)
    tables["after.1"] = np.where(np.arange(VOCAB) % 4, tables["after.1"], -1)
    drafter = Bigram(5, vocab_size=VOCAB, order=order)
    tokens, lengths = pad(PROMPTS)
    request, capacity = prepare_inputs(
        MODEL, drafter, tokens, lengths, jax.random.key(0), 9, specjax.Sampling(), None, ()
    )
    params = {"target": PARAMS, "drafter": tables}
    state = unanswered(MODEL, drafter, "auto", capacity, params, request)
    draft, _ = round.draft_step(
        drafter, params, state.drafter_state, round.round_context(params, state)
    )
    ended = 0
    for row, prompt in enumerate(PROMPTS):
        text = [-1] * order + prompt
        for node in range(1, 6):
            last = jnp.asarray([text[1 - order :]])
            token = int(bigram.successor(tables, last)[0])
            text.append(token)
            assert bool(draft.candidate[row, node]) == (token >= 0)
            assert token < 0 or int(draft.tokens[row, node]) == token
            ended += token < 0
    assert draft.laws is None and 0 < ended < 5 * len(PROMPTS)


LM = specjax.LM.of(*bag(11, 3), max_positions=64)


def test_a_table_is_saved_loaded_and_named_in_combinations(tmp_path):
    drafter, tables = Bigram(3, vocab_size=11, order=3), counted(11, 3)
    folder = str(tmp_path / "table")
    specjax.save_drafter(drafter, tables, folder)
    loaded = specjax.load_drafter(folder, LM)
    assert loaded.drafter == drafter
    assert all((loaded.params[name] == x).all() for name, x in tables.items())
    resolve = lambda name, *more: drafter_names.resolve_drafter(LM, name, *more)  # noqa: E731
    assert resolve(folder, 5)[0] == dataclasses.replace(drafter, topology=trees.chain(5))
    found, weights = resolve(f"ngram+{folder}")
    assert isinstance(found, Hybrid) and isinstance(found.inner, Bigram)
    assert weights["after.1"].shape == (11,)
    assert isinstance(resolve(f"suffix+{folder}")[0], Fallback)
    plain = specjax.generate(LM, [1, 2, 3], drafter=None, max_new_tokens=20)
    for name in (folder, f"ngram+{folder}"):
        out = specjax.generate(LM, [1, 2, 3], drafter=name, max_new_tokens=20)
        assert out.tokens[0].tolist() == plain.tokens[0].tolist()
        assert out.stats.drafted.sum() > 0


def test_the_command_counts_files_for_a_model(tmp_path, capsys):
    file, folder = tmp_path / "text.txt", str(tmp_path / "table")
    file.write_text("def area(r):\n    return 3.14 * r * r\n" * 3)
    assert command(["bigram", str(file), "-o", folder, "--order", "3"]) == 0
    assert "successors of" in capsys.readouterr().out
    lm = specjax.load("embedded")
    found, weights = drafter_names.resolve_drafter(lm, f"cascade:draft:ngram+{folder}")
    assert isinstance(found, Cascade) and isinstance(found.inner.inner, Bigram)
    ids = lm.tokenizer.encode(file.read_text())
    tables = bigram.count([ids], lm.target.vocab_size, 3)
    held = weights["inner"]
    assert {*held} == {*tables} and all((held[name] == x).all() for name, x in tables.items())
    for words, what in (
        ([str(file), "-o", folder], "is there already"),
        ([str(file), "-o", folder + "2", "--order", "1"], "2 to 8 tokens"),
        ([str(tmp_path / "none"), "-o", folder + "2"], "there is no such file"),
    ):
        assert command(["bigram", *words]) == 2 and what in capsys.readouterr().err


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"order=1.*2 to 8 tokens"):
        Bigram(vocab_size=9, order=1)
    with pytest.raises(ValueError, match="give the size of the target's vocabulary"):
        Bigram()
    with pytest.raises(ValueError, match="one most frequent successor"):
        Bigram(vocab_size=9, topology=trees.branching(2, 1))
    with pytest.raises(ValueError, match=r"the token 9, and the vocabulary has 9.*own tokenizer"):
        bigram.count([[1, 9]], 9)
    with pytest.raises(ValueError, match="no two tokens in a row"):
        bigram.count([[1], []], 9)
    for tables in (None, counted(9), counted(8, 3)):
        with pytest.raises(ValueError, match=r"give what bigram.count\(texts, 9, order=3\)"):
            Bigram(vocab_size=9, order=3).init(tables, None, 1, 9)
    specjax.save_drafter(Bigram(vocab_size=9), counted(9), tmp_path)
    with pytest.raises(ValueError, match=r"vocab_size=9 \(the target: 11\).*specjax bigram"):
        specjax.load_drafter(tmp_path, LM)
    with pytest.raises(ValueError, match="has 9 tokens and that of the outer model"):
        Cascade(DraftModel(3, model=MODEL), Hybrid(inner=Bigram(vocab_size=9), lookup=NGram()))
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="give what bigram.count"):
        specjax.load_drafter(tmp_path, LM)
