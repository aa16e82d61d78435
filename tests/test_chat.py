"""Conversations: caches go on between turns, and what is said is what a new start would say."""

import dataclasses
import io
import json

import jax
import pytest
from asking import flat
from combinations import COSTS, RESTLESS
from interruptions import interrupt_screen
from transformers import PreTrainedTokenizerFast

import specjax
from specjax import cli
from specjax._internal import compile_cache
from specjax.cli.prompts import read_prompts
from specjax.drafters import Adaptive, DraftModel
from specjax.models.causal_lm import CausalLM
from specjax.models.lm import as_drafter
from specjax.models.tokenizer import wrap_tokenizer

pytest_plugins = ["pairs"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
TURNS = ["def f(x):\n", "class A:\n", "import os\n"]
SETTINGS = {
    "greedy": {"drafter": "ngram"},
    "sampled": {"drafter": "draft", "temperature": 1.0, "num_draft": 3, "seed": 5},
    "adaptive": {"drafter": "adaptive"},
    "window": {"drafter": "draft", "num_draft": 3},
}


def windowed(lm):
    target = CausalLM(dataclasses.replace(lm.config, window=16))
    return dataclasses.replace(lm, target=target)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_turn_reads_its_own_tokens_and_says_what_a_new_start_says(pair, name):
    lm, draft = pair
    if name == "window":  # caches are rings that the conversation goes around more than once
        lm, draft = map(windowed, pair)
    options = {"max_new_tokens": 12, "stop": ()} | SETTINGS[name]
    options |= {"drafter": draft} if options["drafter"] == "draft" else {}
    if options["drafter"] == "adaptive":  # whose cache lags by as much as was not drafted
        model = as_drafter(lm, draft)
        drafter = Adaptive(DraftModel(num_draft=3, model=model), RESTLESS)
        weights = {"inner": draft.params, "costs": COSTS[:3]}
        options |= {"drafter": drafter, "drafter_params": weights}
    chat, text, fed = specjax.Chat(lm, **flat(**options)), [], []
    for number, turn in enumerate(TURNS):
        before = chat.fed
        said = "".join(piece.text for piece in chat.say(turn))
        text += lm.tokenizer.encode(turn)
        seed = options.get("seed", 0) + number
        anew = specjax.generate(lm, [text], **flat(**options | {"seed": seed}))
        assert said == anew.text and chat.generation.tokens[0].tolist() == anew.tokens[0].tolist()
        text += anew.tokens[0].tolist()
        fed.append(chat.fed - before)
    assert fed == [len(lm.tokenizer.encode(turn)) for turn in TURNS]


@pytest.fixture
def templated(pair):
    """The target with a chat template."""
    backend = PreTrainedTokenizerFast(tokenizer_object=pair[0].tokenizer.backend)
    backend.chat_template = TEMPLATE
    return dataclasses.replace(pair[0], tokenizer=wrap_tokenizer(backend, (0,)))


def test_with_a_template_the_conversation_is_that_of_the_messages(templated):
    chat = specjax.Chat(templated, system="Be brief.", drafter="ngram", max_new_tokens=9)
    for turn in TURNS:
        said = "".join(piece.text for piece in chat.say(turn))
        prompt = templated.chat(chat.messages[:-1])
        anew = specjax.generate(templated, [prompt], drafter="ngram", max_new_tokens=9)
        assert said == anew.text == chat.messages[-1]["content"]
    assert [m["role"] for m in chat.messages] == ["system"] + 3 * ["user", "assistant"]


ASKED = [{"role": "user", "content": "def f(x):"}]


def test_a_conversation_is_a_prompt_in_calls_and_in_files(templated, tmp_path):
    how = dict(drafter="ngram", max_new_tokens=9)
    alone = specjax.generate(templated, [templated.chat(ASKED)], **how)
    for prompts in ({"messages": ASKED}, ["a", {"messages": ASKED}]):
        assert specjax.generate(templated, prompts, **how).texts[-1] == alone.text
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text(json.dumps({"messages": ASKED, "id": "a"}) + "\n")
    specjax.serve_offline(templated, file, output=output, batch=1, **how)
    (line,) = map(json.loads, output.read_text().splitlines())
    assert (line["id"], line["text"]) == ("a", alone.text)
    (read,) = read_prompts(str(file), "m", 9)  # as plan and quality do
    assert specjax.generate(templated, [read], **how).text == alone.text
    answered = [*ASKED, {"role": "assistant", "content": "pass"}]
    for given, words in (
        ({"messages": []}, "is no conversation: give a list such as"),
        ({"messages": "def f(x):"}, "is no conversation"),
        ({"messages": [*ASKED, {"role": "user"}]}, "message 1 has no content"),
        ({"messages": ["a"]}, "message 0 has no role and no content"),
        ({"messages": ASKED, "prompt": "a"}, "a conversation has the key 'messages' alone"),
        ({"messages": answered}, "ends with the assistant's message"),
    ):
        with pytest.raises(ValueError, match=words):
            specjax.generate(templated, [given], **how)
    with pytest.raises(ValueError, match="in one field, prompt, text or messages"):
        specjax.serve_offline(templated, [{"messages": ASKED, "prompt": "a"}], **how)
    file.write_text('{"messages": 3}\n')
    with pytest.raises(ValueError, match="line 1: the prompt: 3 is no conversation"):
        specjax.serve_offline(templated, file, max_broken=0, **how)
    with pytest.raises(ValueError, match="line 1: messages: 3 is no conversation"):
        read_prompts(str(file), "m", 9)
    file.write_text(json.dumps({"messages": ASKED, "text": "a"}) + "\n")
    with pytest.raises(ValueError, match="line 1: give a string that is not empty"):
        read_prompts(str(file), "m", 9)
    (tmp_path / "prompts.txt").write_text(json.dumps({"messages": ASKED}) + "\n")
    with pytest.raises(ValueError, match="ends with .jsonl"):
        specjax.serve_offline(templated, tmp_path / "prompts.txt", **how)


def test_a_conversation_that_outgrows_its_buffer_moves_to_a_larger_one(pair, monkeypatch):
    monkeypatch.setattr("specjax.text.chat.LEAST_BUFFER", 32)
    options = {"drafter": None, "max_new_tokens": 12, "stop": ()}
    chat, text = specjax.Chat(pair[0], **flat(**options)), []
    for turn in TURNS:
        said = "".join(piece.text for piece in chat.say(turn))
        text += pair[0].tokenizer.encode(turn)
        assert said == specjax.generate(pair[0], [text], **flat(**options)).text
        text += chat.generation.tokens[0].tolist()
    with pytest.raises(ValueError, match="do not fit into the context"):
        list(chat.say("x = 1\n" * 400))


def test_an_answer_that_was_cut_off_is_part_of_the_conversation_as_far_as_it_went(pair):
    options = {"drafter": None, "max_new_tokens": 40, "stop": ()}
    chat = specjax.Chat(pair[0], **flat(**options))
    for number, _ in enumerate(answer := chat.say(TURNS[0])):
        if number == 2:
            answer.close()
            break
    cut = chat.generation.tokens[0].tolist()
    assert 0 < len(cut) < 40 and not chat.generation.finished
    text = [*pair[0].tokenizer.encode(TURNS[0]), *cut, *pair[0].tokenizer.encode(TURNS[1])]
    said = "".join(piece.text for piece in chat.say(TURNS[1]))
    assert said == specjax.generate(pair[0], [text], **flat(**options)).text
    assert chat.fed == sum(len(pair[0].tokenizer.encode(turn)) for turn in TURNS[:2])


def test_the_next_turn_ends_an_answer_that_is_still_being_written(pair):
    """Two texts of as many tokens, so that the lengths of their states do not tell them apart."""
    options = {"drafter": None, "max_new_tokens": 8, "stop": ()}
    chat = specjax.Chat(pair[0], **flat(**options))
    first = chat.say("import")
    next(first)
    cut = chat.generation.tokens[0].tolist()
    list(chat.say("defdef"))
    assert not list(first)
    encode = pair[0].tokenizer.encode
    text = [*encode("import"), *cut, *encode("defdef")]
    assert chat.generation.prompts[0].tolist() == text
    text += chat.generation.tokens[0].tolist()
    list(chat.say("x"))
    anew = specjax.generate(pair[0], [[*text, *encode("x")]], **flat(**options))
    assert chat.generation.tokens[0].tolist() == anew.tokens[0].tolist()
    before = chat.fed
    with pytest.raises(ValueError, match="do not fit into the context"):
        list(chat.say("x" * 2000))
    assert chat.fed == before


def test_a_text_that_a_stop_string_cut_is_read_anew_without_the_cut_tokens(pair):
    options = {"drafter": None, "max_new_tokens": 20, "stop": ()}
    whole = specjax.generate(pair[0], TURNS[0], **flat(**options)).text
    string = whole[6:9]
    chat = specjax.Chat(pair[0], **flat(stop_strings=string, **options))
    assert "".join(piece.text for piece in chat.say(TURNS[0])) == whole.split(string)[0]
    kept = chat.generation.tokens[0].tolist()
    text = [*pair[0].tokenizer.encode(TURNS[0]), *kept, *pair[0].tokenizer.encode(TURNS[1])]
    list(chat.say(TURNS[1]))
    anew = specjax.generate(pair[0], [text], **flat(stop_strings=string, **options))
    assert chat.generation.text == anew.text


@pytest.fixture
def talk(folders, capsys, monkeypatch):
    """``talk(lines, *arguments) -> (exit code, stdout, stderr)``."""
    monkeypatch.setattr(compile_cache, "enable", lambda: None)

    def call(lines, *arguments):
        given = iter(lines)

        def line(prompt):
            try:
                return next(given)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", line)
        options = ["--model", str(folders["target"]), "--max-tokens", "8", *arguments]
        return cli.main(["chat", *options]), *capsys.readouterr()

    return call


def test_the_command_reads_each_line_once_and_begins_anew_when_told(talk, pair):
    code, out, err = talk(["def f(x):", "", "/new", "def f(x):"])
    chat = specjax.Chat(pair[0], drafter="ngram", max_new_tokens=8)
    said = "".join(piece.text for piece in chat.say("def f(x):\n"))
    assert code == 0 and out.count(said) == 2
    assert err.count(f"{chat.fed} tokens read") == 2


def test_a_line_of_a_pipe_that_is_refused_ends_the_command_with_its_code(talk):
    code, out, err = talk(["a", "b"], "--num-draft", "99")
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert "--num-draft 99: the number of drafts" in err


def test_a_line_of_a_pipe_that_is_no_text_is_refused(folders, monkeypatch, capsys):
    monkeypatch.setattr(compile_cache, "enable", lambda: None)
    command = ["chat", "--model", str(folders["target"]), "--max-tokens", "2"]
    for last, code in ((b"\xff", 2), ("é".encode(), 0)):
        given = io.TextIOWrapper(io.BytesIO(b"def f(x):\n" * 2 + last), encoding="latin-1")
        monkeypatch.setattr("sys.stdin", given)
        assert cli.main(command) == code
        said = capsys.readouterr().err
        assert ("error: a line that was piped in is not UTF-8 text" in said) == bool(code)
        assert said.count("tokens read") == (0 if code else 3)  # it is refused where it is read


def test_ctrl_c_ends_an_answer_and_not_the_program(talk, monkeypatch):
    shown = interrupt_screen(monkeypatch, 1)
    code, out, err = talk(["def f(x):", "class A:"], "--num-speculative-tokens", "2")
    assert code == 0 and err.count("interrupted") == 1 and err.count("tokens read") == 2
    assert len(shown) > 1


def test_an_answer_whose_state_was_lost_is_kept_as_far_as_it_was_shown(pair):
    """Ctrl-C within a burst, which was given the state's buffers."""
    chat = specjax.Chat(pair[0], drafter=None, max_new_tokens=40, stop=())
    answer = chat.say(TURNS[0])
    next(answer)
    jax.tree.map(lambda x: x.delete(), chat._stream.state)
    shown = chat.generation.tokens[0].tolist()
    answer.close()
    text = pair[0].tokenizer.encode(TURNS[0]) + shown
    text += pair[0].tokenizer.encode(TURNS[1])
    said = "".join(piece.text for piece in chat.say(TURNS[1]))
    options = dict(drafter=None, max_new_tokens=40, stop=(), seed=1)
    assert said == specjax.generate(pair[0], [text], **flat(**options)).text


def test_special_tokens_are_not_shown_by_a_chat_with_a_template(pair, templated):
    """Nor where the tokenizer does not mark them: id 5 ends texts as a word of the vocabulary."""
    lm = dataclasses.replace(
        templated, tokenizer=wrap_tokenizer(templated.tokenizer.backend, (0, 5))
    )
    assert lm.tokenizer.backend.decode([5]) and lm.tokenizer.decode([5]) == ""
    bias = specjax.Sampling(logit_bias={5: 1e9})
    chat = specjax.Chat(lm, drafter=None, max_new_tokens=4, sampling=bias, stop=())
    assert "".join(piece.text for piece in chat.say("a")) == ""
    assert chat.generation.tokens[0].tolist() == [5] * 4


def test_a_template_that_refuses_messages_says_so(templated):
    templated.tokenizer.backend.chat_template = "{{ raise_exception('no system here') }}"
    chat = specjax.Chat(templated, system="Be brief.", drafter=None, max_new_tokens=2)
    with pytest.raises(ValueError, match="template refuses these messages: no system here"):
        list(chat.say("a"))
    for seed in (-1, 2**32, [7]):
        with pytest.raises(ValueError, match="seed"):
            specjax.Chat(templated, seed=seed)
