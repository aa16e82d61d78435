"""Stop strings: the text is cut before them, however many tokens a round commits."""

import itertools

import numpy as np
import pytest
from asking import flat

import specjax
from specjax.text.stop_strings import StopStrings, per_row

pytest_plugins = ["pairs"]
PROMPTS = ["def f(x):", "import os\n\n\nclass A:\n    def"]


@pytest.mark.parametrize("strings", [("END",), ("ab", "abc"), ("aab", "b\n"), ("x",)])
def test_whatever_the_pieces_the_text_ends_before_the_first_stop_string(strings):
    text = "aaab\nabcENENDE x"
    first = min(place for s in strings if (place := text.find(s)) >= 0)
    for cuts in itertools.combinations(range(1, 10), 2):
        stop, shown = StopStrings(strings), ""
        for piece in (text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]):
            shown += stop.push(piece)
            assert text[:first].startswith(shown)  # nothing of a stop string was ever shown
        assert stop.found and shown + stop.flush() == text[:first]


def test_what_only_might_have_become_a_stop_string_is_shown_in_the_end():
    stop = StopStrings(("END",))
    assert (stop.push("a EN"), stop.push("E"), stop.flush()) == ("a ", "EN", "E")
    assert not stop.found


def free(pair, **options):
    return specjax.generate(
        pair[0], PROMPTS, **flat(max_new_tokens=24, stop=(), drafter=None, **options)
    )


def stop_in(text):
    """A string that ends within a text, over the edge of a token or two."""
    return text[len(text) // 2 : len(text) // 2 + 5]


@pytest.mark.parametrize("drafter", [None, "ngram", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_cut_and_the_row_ended_the_others_go_on(pair, drafter, temperature):
    options = {"temperature": temperature, "drafter": drafter, "stop": (), "max_new_tokens": 24}
    options |= {"drafter": pair[1]} if drafter == "draft" else {}
    whole = specjax.generate(pair[0], PROMPTS, **flat(**options))
    string = stop_in(whole.texts[0])
    out = specjax.generate(
        pair[0], PROMPTS, **flat(stop_strings=[[string], []], logprobs=True, **options)
    )
    assert out.texts == [whole.texts[0].split(string)[0], whole.texts[1]]
    assert out.reasons == ["stop", "length"] and out.finished
    count = len(out.tokens[0])  # up to the token that completed the stop string
    assert out.tokens[0].tolist() == whole.tokens[0][:count].tolist()
    decode = pair[0].tokenizer.decode
    assert string in decode(out.tokens[0]) and string not in decode(out.tokens[0][:-1])
    assert len(out.logprobs[0]) == len(out.from_draft[0]) == count
    alone = specjax.generate(pair[0], PROMPTS[0], **flat(stop_strings=string, **options))
    assert alone.texts == out.texts[:1]


def test_a_stream_shows_no_part_of_it_and_the_row_costs_nothing_more(pair):
    whole = free(pair)
    string = stop_in(whole.texts[0])
    stream = specjax.stream_text(
        pair[0], PROMPTS, stop_strings=string, drafter=None, stop=(), max_new_tokens=24
    )
    shown = ["", ""]
    for piece in stream:
        shown[piece.row] += piece.text
        assert whole.texts[0].split(string)[0].startswith(shown[0])
    out = stream.generation
    assert shown == out.texts and stream.num_tokens == sum(map(len, out.tokens))
    # bursts grow, so some rounds may have run after the end; without the end there would be 23
    assert out.stats.rounds[0] < 23 == whole.stats.rounds[0]


REFUSED = {
    "an empty one": (["a", ""], ValueError, "an empty string"),
    "an empty one in a row": ([["a"], [""]], ValueError, "an empty string"),
    "rows of another batch": ([["a"]], ValueError, "1 rows for 2 prompts"),
    "a number": (5, TypeError, "stop_strings=5"),
    "bytes": (b"ab", TypeError, "stop_strings=b'ab'"),
    "numbers": ([[1], [2]], TypeError, "list of strings"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_stop_strings_are_refused(what):
    given, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        per_row(given, 2)


# ---------------------------------------------------------------------- seeds, samples, log p


def test_a_row_with_a_seed_of_its_own_says_what_it_says_alone(pair):
    options = {"temperature": 1.0, "drafter": pair[1], "num_draft": 2, "max_new_tokens": 10}
    both = specjax.generate(pair[0], PROMPTS, **flat(seed=[3, 8], num_samples=2, **options))
    for row, seed in enumerate((3, 8)):
        alone = specjax.generate(pair[0], PROMPTS[row], **flat(seed=seed, num_samples=2, **options))
        assert both.texts[2 * row : 2 * row + 2] == alone.texts
    assert len({*both.texts}) == 4
    with pytest.raises(ValueError, match="seed has 3 values for 2 prompts"):
        specjax.generate(pair[0], PROMPTS, **flat(seed=[1, 2, 3], **options))


def test_log_probabilities_come_with_the_tokens(pair):
    out = specjax.generate(pair[0], PROMPTS, drafter="ngram", max_new_tokens=6, logprobs=True)
    assert [len(row) for row in out.logprobs] == [len(row) for row in out.tokens]
    assert all(np.all(row < 0) for row in out.logprobs)
    assert specjax.generate(pair[0], "a", drafter=None, max_new_tokens=2).logprobs is None
