"""How a model turns a text into a vector or a score: by the files of sentence-transformers, or by default.

`modules.json` lists what comes after the transformer: pooling, dense layers, normalisation, or a score. Its folders
hold their settings and weights. No torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigError, show
from .fields import Fields
from .files import is_listed, read_json_object, read_text

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
Task = Literal["embed", "rerank"]
DOES = {"generate": "generates text", "embed": "embeds texts", "rerank": "scores pairs of texts"}
"""What a model of each task does, for errors."""
Activation = Literal["Identity", "Tanh", "ReLU", "GELU"]

SCORE = "score.weight"
"""The tensor [1, hidden] of models that were saved as classifiers of sequences with one label."""
YES_AND_NO = ("yes", "no")
"""The tokens whose logits score a pair, of a model that was trained to answer with one of them."""
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODES = tuple(_FLAGS.values())
"""In the order in which sentence-transformers concatenates them."""
_ACTIVATIONS: tuple[Activation, ...] = ("Identity", "Tanh", "ReLU", "GELU")
_MAX_WIDTH = 1 << 20
_MAX_CONTEXT = 1 << 30
_MAX_IDS = 1 << 24


@dataclass(frozen=True)
class DenseLayer:
    """A layer after the pooling: activation(weight[outputs, inputs] x + bias), weights in `folder`."""

    folder: str
    inputs: int
    outputs: int
    has_bias: bool
    activation: Activation


@dataclass(frozen=True)
class Pooling:
    """What becomes of the hidden states after the last norm.

    modes: what is taken of the tokens of a text, concatenated. dense: layers after that. width: of the vector.
    normalise: vectors get the length 1. longest: the most tokens of a text, if the files say so. prompts: texts that go
    before a text, by name; default_prompt: the name of the one that does if none is asked for. dimensions: how many
    of the first numbers of a vector can be asked for; empty if any number.
    score_tokens: (true) or (true, false), ids or tokens of the vocabulary, whose logit or difference of logits scores
    a pair of texts. For task "rerank" without them, the score is the product with the tensor SCORE.
    """

    task: Task
    modes: tuple[str, ...] = ("lasttoken",)
    dense: tuple[DenseLayer, ...] = ()
    width: int = 1
    normalise: bool = False
    longest: int | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None
    dimensions: tuple[int, ...] = ()
    score_tokens: tuple[int | str, ...] = ()

    @property
    def reads_all(self) -> bool:
        """Whether the hidden states of all tokens are read, not only that of the last."""
        return self.modes != ("lasttoken",)


def read_pooling(c: Fields, text: Fields) -> Pooling | None:
    """Return the pooling of a model directory; None if its model generates text. c, text: the fields of config.json and
    of the language model. Raises ConfigError."""
    model_dir = c.path.parent
    if is_listed(model_dir, MODULES):
        return _read_modules(model_dir, c, text)
    architectures = c.values.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if any(str(name).endswith("ForSequenceClassification") for name in names):
        labels = c.values.get("id2label")
        if c.values.get("num_labels", 1) != 1 or len(labels if isinstance(labels, dict) else [0]) != 1:
            raise c.fail("id2label", "one label (a model that scores pairs of texts)")
        return Pooling("rerank")
    return None


def default_pooling(task: Task, c: Fields, text: Fields) -> Pooling:
    """Return how a model that generates text embeds texts or scores pairs: as Qwen3-Embedding and Qwen3-Reranker."""
    if task == "rerank":
        return Pooling("rerank", score_tokens=YES_AND_NO)
    width = text.integer("hidden_size", 1, _MAX_WIDTH)
    return Pooling("embed", width=width, normalise=True, dimensions=_dimensions(c, width))


def _read_modules(model_dir: Path, c: Fields, text: Fields) -> Pooling:
    found = _modules(model_dir)
    kinds = [kind for kind, _ in found]
    where = model_dir / MODULES
    if kinds == ["Transformer", "LogitScore"]:
        settings = _settings(model_dir, found[1][1])
        tokens = [settings.integer("true_token_id", 0, _MAX_IDS)]
        if settings.has("false_token_id"):
            tokens.append(settings.integer("false_token_id", 0, _MAX_IDS))
        return Pooling("rerank", longest=_longest(_transformer(model_dir)), score_tokens=tuple(tokens))
    after = kinds[2:-1] if kinds[-1:] == ["Normalize"] else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(after) - {"Dense"} or found[0][1]:
        raise ConfigError(
            f"{where}: expected Transformer in the directory itself, Pooling, layers Dense and Normalize, or "
            f"Transformer and LogitScore, found {', '.join(kinds) or 'nothing'}"
        )
    transformer = _transformer(model_dir)
    _check_texts(transformer)
    hidden = text.integer("hidden_size", 1, _MAX_WIDTH)
    modes = _pooling_modes(_settings(model_dir, found[1][1]), hidden)
    dense = tuple(_dense(_settings(model_dir, path), path) for kind, path in found if kind == "Dense")
    widths = [hidden * len(modes), *(layer.outputs for layer in dense)]
    for layer, (width, _) in zip(dense, pairwise(widths), strict=True):
        if layer.inputs != width:
            raise ConfigError(
                f"{model_dir / layer.folder / 'config.json'}: in_features: expected {width}, the width of the vector "
                f"before it, found {layer.inputs}"
            )
    prompts, default = _prompts(model_dir)
    return Pooling(
        "embed",
        modes,
        dense,
        widths[-1],
        normalise=kinds[-1] == "Normalize",
        longest=_longest(transformer),
        prompts=prompts,
        default_prompt=default,
        dimensions=_dimensions(c, widths[-1]),
    )


def _modules(model_dir: Path) -> list[tuple[str, str]]:
    """Return the class name and the folder of each module."""
    try:
        listed = json.loads(read_text(model_dir, MODULES, ConfigError))
    except (ValueError, RecursionError) as failure:
        if isinstance(failure, ConfigError):
            raise
        raise ConfigError(f"{model_dir / MODULES}: not valid JSON: {failure}") from None
    modules = []
    for one in listed if isinstance(listed, list) else [listed]:
        kind, path = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str) or "/" in path:
            raise ConfigError(
                f"{model_dir / MODULES}: expected a list of objects with type and path, found {show(one)}"
            )
        modules.append((kind.rpartition(".")[2], path))
    return modules


def _settings(model_dir: Path, folder: str) -> Fields:
    values = read_json_object(model_dir, "config.json", ConfigError, folder)
    return Fields(model_dir / folder / "config.json", values)


def _pooling_modes(c: Fields, hidden: int) -> tuple[str, ...]:
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if c.has(key) and c.integer(key, 1, _MAX_WIDTH) != hidden:
            raise c.fail(key, f"{hidden}, the hidden size")
    if c.has("include_prompt") and not c.flag("include_prompt"):
        raise c.fail("include_prompt", "true (leaving prompts out of the pooling is not supported)")
    if c.has("pooling_mode"):
        given = c.values["pooling_mode"]
        modes: set[Any] = set(given) if isinstance(given, list) else {given}
    else:
        modes = {mode for key, mode in _FLAGS.items() if c.flag(key)}
    if modes - set(_MODES):
        raise c.fail("pooling_mode", " or ".join(_MODES))
    return tuple(mode for mode in _MODES if mode in modes) or ("mean",)


def _dense(c: Fields, folder: str) -> DenseLayer:
    if c.flag("use_residual"):
        raise c.fail("use_residual", "false")
    name = c.text("activation_function").rpartition(".")[2] if c.has("activation_function") else "Tanh"
    activation = next((one for one in _ACTIVATIONS if one == name), None)
    if activation is None:
        raise c.fail("activation_function", " or ".join(_ACTIVATIONS))
    inputs, outputs = (c.integer(key, 1, _MAX_WIDTH) for key in ("in_features", "out_features"))
    return DenseLayer(folder, inputs, outputs, c.flag("bias") if c.has("bias") else True, activation)


def _prompts(model_dir: Path) -> tuple[Mapping[str, str], str | None]:
    """Return the prompts by name, and the name of the one that is used if none is asked for."""
    if not is_listed(model_dir, PROMPTS):
        return {}, None
    c = Fields(model_dir / PROMPTS, read_json_object(model_dir, PROMPTS, ConfigError))
    prompts = c.object("prompts").values if c.has("prompts") else {}
    if not all(type(prompt) is str for prompt in prompts.values()):
        raise c.fail("prompts", "an object of strings")
    default = c.text("default_prompt_name") if c.has("default_prompt_name") else None
    if default is not None and default not in prompts:
        raise c.fail("default_prompt_name", "the name of one of the prompts")
    return prompts, default


def _transformer(model_dir: Path) -> Fields:
    """Return the settings of the module Transformer, which need not have a file."""
    is_written = is_listed(model_dir, TRANSFORMER)
    values = read_json_object(model_dir, TRANSFORMER, ConfigError) if is_written else {}
    return Fields(model_dir / TRANSFORMER, values)


def _longest(transformer: Fields) -> int | None:
    key = "max_seq_length"
    return transformer.integer(key, 1, _MAX_CONTEXT) if transformer.has(key) else None


def _check_texts(transformer: Fields) -> None:
    """Raise ConfigError if sentence-transformers makes a chat of each text.

    Newer versions write which kinds of input a model takes. If the tokenizer had a chat template then, one of them is
    "message", and each text becomes the message of a user. Files of older versions name no kinds: the model reads texts
    as they are.
    """
    key = "modality_config"
    if transformer.has(key) and (kinds := transformer.object(key)).has("message"):
        raise kinds.fail("message", "none (texts that the chat template renders are not supported)")


def _dimensions(c: Fields, width: int) -> tuple[int, ...]:
    """Return the lengths to which vectors can be cut; empty if any. vLLM reads the same keys."""
    if c.has("matryoshka_dimensions"):
        given = c.values["matryoshka_dimensions"]
        if not isinstance(given, list) or not all(type(one) is int and 0 < one <= width for one in given):
            raise c.fail("matryoshka_dimensions", f"a list of integers from 1 to {width}")
        return tuple(given)
    is_whole = c.has("is_matryoshka") and not c.flag("is_matryoshka")
    return (width,) if is_whole else ()
