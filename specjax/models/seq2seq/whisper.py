"""The prompt of Whisper's decoder.

This example transcribes a window of 30 seconds::

    from transformers import AutoFeatureExtractor  # or AutoProcessor

    lm = specjax.load("openai/whisper-large-v2")
    small = specjax.load("distil-whisper/distil-large-v2")
    extract = AutoFeatureExtractor.from_pretrained("openai/whisper-large-v2")
    features = extract(audio, sampling_rate=16_000, return_tensors="np").input_features
    begin = specjax.models.start_ids(lm, language="en")
    out = specjax.generate(lm, begin, inputs=features, drafter=small)

specjax suppresses the tokens that ``generation_config.json`` names, everywhere (by a logit bias)
and at the first position (also with a drafter, where transformers leaves this out). It does not
implement other rules of ``generate`` of transformers: the detection of a language, the rules of
timestamps, windows beyond the first 30 seconds, and the repetition of a window at other
temperatures. Ask for text without timestamps, one window at a time.
"""

from __future__ import annotations

from ..lm import LM


def start_ids(
    lm: LM, language: str | None = None, task: str = "transcribe", timestamps: bool = False
) -> list[int]:
    """The prompt of Whisper's decoder: ``<|startoftranscript|><|en|><|transcribe|>...``.

    Args:
      lm: a Whisper, with its tokenizer.
      language: a code such as ``"en"``; None only for a model that knows English alone,
        or whose configuration names a language.
      task: ``"transcribe"``, or ``"translate"`` into English; without a language it is left out.
      timestamps: False adds ``<|notimestamps|>``.

    Raises:
      ValueError: another kind of model, or a language or task that it does not know.

    Example::

        specjax.models.start_ids(lm, language="de")  # [50258, 50261, 50359, 50363]
    """
    if lm.config.model_type != "whisper" or lm.tokenizer is None:
        raise ValueError(f"start_ids: {lm.name} is not a Whisper with a tokenizer")
    if language is None and not lm.config.start_ids:
        raise ValueError(
            f"start_ids: {lm.name} knows several languages: give one, such as language='en'"
        )
    known = {token: i for i, token in lm.tokenizer.vocabulary.items()}
    names = [] if language is None else [language, task]
    names = [f"<|{name}|>" for name in (*names, *(() if timestamps else ("notimestamps",)))]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"start_ids: {lm.name} does not know {', '.join(unknown)}: a language is a code such "
            "as 'en' (None for a model of English alone), a task 'transcribe' or 'translate'"
        )
    return [lm.config.start_id, *(known[name] for name in names)]
