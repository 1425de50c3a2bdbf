"""The settings of speech in config.json: voices, and the ids of a talker's prompt. Imports no torch."""

from dataclasses import dataclass, replace

from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields

SAMPLE_RATE = 24000
"""Samples of speech in a second."""
_SPEAKS = "enable_audio_output"
_MAX_ID = (1 << 24) - 1
_UNSPOKEN = 1024
"""The last codes of the talker's vocabulary are no sound, but the end of speech is one of them."""


@dataclass(frozen=True)
class SpeechSettings:
    """Ids of a model that speaks.

    voices: codes of the talker by name, in lower case. start, user, assistant: token ids that open a turn and name its
    role. text_begin, text_end, text_pad: token ids that the talker reads before, after and long after a text.
    thinking: three codes that precede the voice; pad, begin: those that follow it. end: the code that ends speech.
    vocab: how many codes the talker has; `codes`: how many of them it may choose for a frame, from 0 on.
    """

    voices: dict[str, int]
    start: int
    user: int
    assistant: int
    text_begin: int
    text_end: int
    text_pad: int
    thinking: tuple[int, int, int]
    pad: int
    begin: int
    end: int
    codes: int
    vocab: int


def speaks(fields: Fields) -> bool:
    """Has the model of a config.json a talker that is in use?"""
    return fields.has("talker_config") and (fields.flag(_SPEAKS) or not fields.has(_SPEAKS))


def voices_of(card: ModelCard) -> tuple[str, ...]:
    """Return the names of a model's voices, in the order of its config.json; none if it does not speak."""
    settings = read_speech_settings(card)
    return () if settings is None else tuple(settings.voices)


def silenced(card: ModelCard) -> ModelCard:
    """Return the card of the same model without its speech. Raises ConfigError for a model that never speaks."""
    if not card.fields.has("talker_config"):
        raise card.fields.fail("talker_config", "that of a model that speaks, with --no-talker")
    return replace(card, fields=Fields(card.fields.path, {**card.fields.values, _SPEAKS: False}))


def read_speech_settings(card: ModelCard) -> SpeechSettings | None:
    """Return the settings of a model that speaks, else None. Raises ConfigError."""
    fields = card.fields
    if not speaks(fields):
        return None
    talker = fields.object("talker_config")
    vocab = talker.object("text_config").integer("vocab_size", _UNSPOKEN + 1, _MAX_ID)

    def token(key: str) -> int:
        return fields.integer(f"{key}_token_id", 0, card.vocab_size - 1)

    def code(key: str) -> int:
        return talker.integer(f"codec_{key}", 0, vocab - 1)

    listed = talker.object("speaker_id")
    if not listed.values:
        raise talker.fail("speaker_id", "at least one voice")
    return SpeechSettings(
        voices={name.lower(): listed.integer(name, 0, vocab - 1) for name in listed.values},
        start=token("im_start"),
        user=token("user"),
        assistant=token("assistant"),
        text_begin=token("tts_bos"),
        text_end=token("tts_eos"),
        text_pad=token("tts_pad"),
        thinking=(code("nothink_id"), code("think_bos_id"), code("think_eos_id")),
        pad=code("pad_id"),
        begin=code("bos_id"),
        end=code("eos_token_id"),
        codes=vocab - _UNSPOKEN,
        vocab=vocab,
    )
