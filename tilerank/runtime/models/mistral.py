"""Mistral (arXiv 2310.06825), Mixtral, Ministral 3, and the language models of Mistral Small 3.1 and its successors.

Llama without biases, with a window in all layers of the oldest models. Mixtral has mixtures of experts. Ministral 3
scales queries by their position. The directories of newer models have a tower of pictures as well (`mistral3`,
pixtral.py).
"""

from collections.abc import Callable
from dataclasses import replace

from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.parallel.sharding import Sharding

from ..media.missing import missing_for
from ..media.mistral3 import read_mistral3_settings
from ..media.settings import read_if_listed
from .attention import SelfAttention, Temperature
from .decoder import Decoder, DecoderNames, FeedForward
from .gated_mlp import dense_mlps
from .qwen_moe import ExpertsConfig, SparseMLP, read_expert_count
from .text_config import MAX_WIDTH, read_text_config, read_window
from .towers.pixtral import PixtralTower, read_pixtral_config
from .towers.tower import floats_alone

_BESIDE_VISION = DecoderNames(
    embedding="language_model.model.embed_tokens",
    norm="language_model.model.norm",
    head="language_model.lm_head",
    layer="language_model.model.layers.{}",
)
_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"
_USUAL_WINDOW = 4096  # of MistralConfig in transformers
_MAX_POSITIONS = 1 << 30


def mistral(card: ModelCard, sharding: Sharding) -> Decoder:
    """MistralForCausalLM."""
    return _decoder(card, sharding, DecoderNames(), usual_window=_USUAL_WINDOW)


def ministral3(card: ModelCard, sharding: Sharding) -> Decoder:
    """Ministral3ForCausalLM."""
    return _decoder(card, sharding, DecoderNames(), temperature=_read_temperature(card.fields))


def mistral3(card: ModelCard, sharding: Sharding) -> Decoder:
    """Mistral3ForConditionalGeneration, whose language model is one of the two above."""
    text, key = card.text, "model_type"
    kind, tower, names = text.text(key), None, _BESIDE_VISION
    if kind not in ("mistral", "ministral3"):
        raise text.fail(key, f"mistral or ministral3{missing_for(kind)}")
    if card.fields.has("vision_config"):
        settings = read_if_listed(read_mistral3_settings, card.fields.path.parent)
        config = read_pixtral_config(card.fields, text)
        tower = PixtralTower(_TOWER, _PROJECTOR, config, settings, floats_alone(sharding))
    else:
        names = replace(names, left_out=(f"{_TOWER}.", f"{_PROJECTOR}."))
    if kind == "mistral":
        return _decoder(card, sharding, names, tower, usual_window=_USUAL_WINDOW)
    return _decoder(card, sharding, names, tower, temperature=_read_temperature(text))


def mixtral(card: ModelCard, sharding: Sharding) -> Decoder:
    """MixtralForCausalLM (arXiv 2401.04088).

    mlp(x) = sum over the chosen experts e of weight_e * w2_e(silu(w1_e(x)) * w3_e(x)); the weights are the softmax of
    their logits.
    """
    fields = card.fields
    count, hidden = read_expert_count(fields, "num_local_experts", 1), fields.integer("hidden_size", 1, MAX_WIDTH)
    experts = ExpertsConfig(
        count=count,
        top_k=fields.integer("num_experts_per_tok", 1, count),
        width=fields.integer("intermediate_size", 1, MAX_WIDTH),
        renormalize=True,
        dense_layers=frozenset(),
    )

    def mlp(name: str, _: int) -> SparseMLP:
        return SparseMLP(name, hidden, experts, sharding, projections=("w1", "w3", "w2"))

    return _decoder(card, sharding, DecoderNames(mlp="block_sparse_moe"), mlp=mlp)


def _decoder(
    card: ModelCard,
    sharding: Sharding,
    names: DecoderNames,
    tower: PixtralTower | None = None,
    *,
    usual_window: int = 0,
    temperature: Temperature | None = None,
    mlp: Callable[[str, int], FeedForward] | None = None,
) -> Decoder:
    """mlp: makes those of a layer (dense)."""
    c = read_text_config(card.text, whole=card.fields)
    window = read_window(card.text, card.context_length, usual=usual_window)

    def mixer(name: str, _: int) -> SelfAttention:
        return SelfAttention(
            name,
            c,
            sharding,
            qkv_bias=False,
            out_bias=False,
            head_norms=False,
            window=window,
            temperature=temperature,
        )

    return Decoder(card, c, sharding, names, mixer, mlp or dense_mlps(c, sharding), tower)


def _read_temperature(c: Fields) -> Temperature | None:
    """Return the temperature of queries; None if the file has none, or one that changes nothing."""
    rope, key = c.object("rope_parameters"), "llama_4_scaling_beta"
    if not rope.has(key) or not (beta := rope.number(key, 0.0, 1e3, above=False)):
        return None
    return Temperature(beta, rope.integer("original_max_position_embeddings", 1, _MAX_POSITIONS))


MODELS = {"mistral": mistral, "ministral3": ministral3, "mistral3": mistral3, "mixtral": mixtral}
