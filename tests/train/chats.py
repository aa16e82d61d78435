"""Shared by tests of chats: a tokenizer with a template, a conversation, a file."""

import json

import tokenizers
import transformers

# ids from 0: end of text, begin of a turn, end of a turn, roles, words
WORDS = ["<|endoftext|>", "<s>", "</s>", "system", "user", "assistant", *"abcdefgh"]
PLAIN = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
TALK = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b c"},
    {"role": "assistant", "content": "d e f"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "g"},
]


def backend(template, eos="</s>"):
    """A tokenizer of transformers with one word a token."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="h")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(WORDS[:3])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=eos, bos_token="<s>", chat_template=template
    )


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (one if isinstance(one, str) else json.dumps(one) for one in records)
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)
