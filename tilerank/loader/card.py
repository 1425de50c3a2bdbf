"""The model card: what launching and serving ask of any model, whatever its family. Readable without torch.

A model is a directory, or a GGUF file, which stands in for the directory's small files (files.py).

A family reads its own fields of config.json in its file of runtime/models/.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .class_defaults import with_class_defaults
from .errors import ConfigError
from .fields import Fields
from .files import read_json_object
from .generation_config import read_generation_config
from .headers import stored_tensors
from .overruled_flags import with_flags_of_tensors
from .pooling import Pooling, read_pooling
from .quantization_config import QuantizationConfig
from .rope import read_context_length
from .stored_quantization import find_quantization

DTYPES = ("bfloat16", "float16", "float32")

# Bounds well above any published model: an absurd number becomes an error message instead of an allocation.
_MAX_VOCABULARY = 1 << 24


@dataclass(frozen=True)
class ModelCard:
    """A model directory's config.json, as far as it is the same for every family.

    vocab_size: columns of the logits, before any padding for tensor parallelism. The embedding has rows for as many ids
    and for those that stand for pictures.
    context_length: tokens of the longest sequence, prompt and new tokens together.
    eos_token_ids: those of generation_config.json and config.json together, because released files leave out some in
    each; without the tokenizer's (Tokenizer.end_token_ids). bos_token_id: that of
    generation_config.json, or of config.json where that has none.
    dtype: one of DTYPES, in which the weights were published. quantization: how the checkpoint stores its
    projections, by the headers of its files; None for floats. fields: all of config.json, for the family, with the
    flags that the tensors show. overruled: a sentence for each flag that config.json has otherwise. pooling: how it
    embeds texts or scores pairs of them; None for a model that generates text. draft_head: whether it drafts with the
    multi-token-prediction head of its checkpoint, which is not loaded otherwise.

    A model with a vision tower has the fields of its language model in `text_config`, which Qwen3-Omni nests in
    `thinker_config`; `text` returns those.
    """

    model_type: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    quantization: QuantizationConfig | None
    fields: Fields = field(repr=False, compare=False)
    overruled: tuple[str, ...] = ()
    pooling: Pooling | None = None
    draft_head: bool = False

    @property
    def text(self) -> Fields:
        """Return the fields of the language model."""
        return _text(self.fields)


def read_card(model_dir: Path) -> ModelCard:
    """Read and check the card. Raises ConfigError naming the file, the key, what was expected and what was found.

    A key that is absent has no default here: families disagree on them, so the file or its class must say.
    """
    c = read_config_fields(model_dir)
    c, overruled = with_flags_of_tensors(c)
    text = _text(c)
    vocab_size = _vocabulary(c, text)
    eos_token_ids, bos_token_id = _special_ids((read_generation_config(model_dir), c, text), vocab_size)
    pooling, context_length = read_pooling(c, text), read_context_length(text)
    if pooling is not None and pooling.longest is not None:
        context_length = min(context_length, pooling.longest)
    return ModelCard(
        model_type=c.text("model_type"),
        vocab_size=vocab_size,
        context_length=context_length,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        dtype=_dtype(c, text),
        quantization=find_quantization(model_dir, _quantization(c, text)),
        fields=c,
        overruled=overruled,
        pooling=pooling,
    )


def read_config_fields(model_dir: Path) -> Fields:
    """Return the fields of config.json, with those that its class adds (class_defaults.py). Raises ConfigError if
    `model_dir` is no directory with such a file, and no GGUF file."""
    try:
        exists = model_dir.exists()
    except OSError as failure:  # no permission to look, or a name too long
        raise ConfigError(f"{model_dir}: cannot be read: {failure.strerror}") from failure
    if not exists:
        raise ConfigError(f"{model_dir}: expected a model directory or a GGUF file, found nothing")
    values = with_class_defaults(read_json_object(model_dir, "config.json", ConfigError))
    return Fields(model_dir / "config.json", values)


def _text(c: Fields) -> Fields:
    c = c.object("thinker_config") if c.has("thinker_config") else c
    return c.object("text_config") if c.has("text_config") else c


def _vocabulary(c: Fields, text: Fields) -> int:
    """Return how many ids are tokens of text: in Gemma 3 all below that of pictures, which others have among them."""
    rows, key = text.integer("vocab_size", 1, _MAX_VOCABULARY), "image_token_index"
    if c.text("model_type") != "gemma3" or not c.has(key):
        return rows
    return min(c.integer(key, 1, _MAX_VOCABULARY), rows)


def _special_ids(holders: Sequence[Fields], vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """Return the end-of-sequence ids of all holders, and the beginning-of-sequence id of the first that has one."""
    eos = [id for f in holders if f.has("eos_token_id") for id in f.ids("eos_token_id", vocab_size)]
    bos = next((f.integer("bos_token_id", 0, vocab_size - 1) for f in holders if f.has("bos_token_id")), None)
    return tuple(dict.fromkeys(eos)), bos


def _dtype(c: Fields, text: Fields) -> str:
    """Return the dtype of the weights.

    transformers 5 writes `dtype`, transformers 4 `torch_dtype`, at the top or beside the language model's fields.
    Without such a key it is the dtype of most tensors; bfloat16 without files.
    """
    keys = ("dtype", "torch_dtype")
    found = next(((f, key) for f in (c, text) for key in keys if f.has(key)), None)
    if found is None:
        stored = Counter(tensor.dtype for tensor in (stored_tensors(c.path.parent) or {}).values())
        floats = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
        return floats[max(floats, key=lambda dtype: stored[dtype])]
    holder, key = found
    name = holder.text(key)
    if name not in DTYPES:
        raise holder.fail(key, "one of " + ", ".join(DTYPES))
    return name


def _quantization(c: Fields, text: Fields) -> Fields | None:
    """Return the object that says how weights are quantised: quantization_config, which may be beside the language
    model's fields, or `quantization`, which MLX writes."""
    keys = ("quantization_config", "quantization")
    return next((holder.object(key) for key in keys for holder in (c, text) if holder.has(key)), None)
