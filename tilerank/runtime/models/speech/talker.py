"""The talker of Qwen3-Omni (arXiv 2509.17765): reads what was said and what is answered, and gives frames of codes.

Its decoder is that of Qwen3-MoE with a shared expert (qwen3_5.py) and interleaved M-RoPE. A row is not an embedded
token but a sum: the projected embedding of a token of the text model, or the projected hidden state of a medium's token
in the text model, and the embeddings of codes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from tilerank.kernels import ops
from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.loader.rope import read_context_length
from tilerank.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tilerank.parallel.parameters import Layer
from tilerank.parallel.sharding import Sharding

from ...step.batch import Batch
from ...step.cache import Cache, CacheSpec
from ...step.speaker import Additions, FrameInputs, Speaker, TalkerRows
from ..attention import SelfAttention
from ..decoder import Decoder, DecoderNames
from ..qwen_moe import read_experts_config, sparse_mlps
from ..text_config import MAX_WIDTH, USUAL_SECTIONS, TextConfig, read_text_config
from .code_predictor import CodePredictor

_NAMES = DecoderNames(
    embedding="talker.model.codec_embedding",
    norm="talker.model.norm",
    head="talker.codec_head",
    layer="talker.model.layers.{}",
)


class Projection(Layer):
    """fc2(silu(fc1(x))) with biases: x[t, in] of the text model -> [t, out] on every rank."""

    def __init__(self, name: str, sizes: tuple[int, int, int], sharding: Sharding) -> None:
        """sizes: of the inputs, between the two layers, and of the outputs."""
        inputs, width, outputs = sizes
        self.fc1 = ColumnParallelLinear(f"{name}.linear_fc1", inputs, width, sharding, bias=True)
        self.fc2 = RowParallelLinear(f"{name}.linear_fc2", width, outputs, sharding, span=self.fc1.span, bias=True)
        self._sharding = sharding

    def __call__(self, x: Tensor) -> Tensor:
        return self._sharding.sum(self.fc2(ops.silu(self.fc1(x))))


class Talker(Speaker):
    """The talker and its code predictor. embed: ids[t] of the text model -> its embeddings [t, hidden]."""

    predictor: CodePredictor

    def __init__(
        self,
        card: ModelCard,
        fields: Fields,
        thinker: TextConfig,
        sharding: Sharding,
        embed: Callable[[Tensor], Tensor],
    ) -> None:
        """fields: talker_config. thinker: the text model. Raises ConfigError."""
        text = fields.object("text_config")
        c = read_text_config(text, sections=USUAL_SECTIONS)
        if fields.integer("thinker_hidden_size", 1, MAX_WIDTH) != thinker.hidden_size:
            raise fields.fail("thinker_hidden_size", f"that of the text model, {thinker.hidden_size}")
        self.kept_layer = fields.integer("accept_hidden_layer", 1, thinker.num_layers - 1)
        self.context_length = read_context_length(text)
        self.hidden = c.hidden_size
        experts = replace(read_experts_config(text, c.num_layers), dense_layers=frozenset())
        shared_width = text.integer("shared_expert_intermediate_size", 1, MAX_WIDTH)
        bias = text.flag("attention_bias")

        def mixer(name: str, _: int) -> SelfAttention:
            return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=bias, head_norms=True)

        mlp = sparse_mlps(c, experts, sharding, fused="out_in", shared_width=shared_width)
        own = replace(card, vocab_size=text.integer("vocab_size", 1, MAX_WIDTH), context_length=self.context_length)
        self.decoder = Decoder(own, c, sharding, _NAMES, mixer, mlp)
        self.predictor = CodePredictor(
            "talker.code_predictor", fields.object("code_predictor_config"), c.hidden_size, sharding
        )
        self.codes = self.predictor.codes
        sizes = thinker.hidden_size, c.intermediate_size, c.hidden_size
        self.text_projection = Projection("talker.text_projection", sizes, sharding)
        self.hidden_projection = Projection("talker.hidden_projection", sizes, sharding)
        self._embed = embed

    def cache_specs(self) -> list[CacheSpec]:
        return self.decoder.cache_specs()

    def frame_cache_specs(self) -> list[CacheSpec]:
        return self.predictor.decoder.cache_specs()

    def project(self, hidden: Tensor) -> Tensor:
        return self.hidden_projection(hidden)

    def read(self, batch: Batch, additions: Additions, caches: Sequence[Cache]) -> TalkerRows:
        x = self._text(batch)
        if additions.media is not None:
            ops.put_rows_(x, *additions.media)
        if additions.codes is not None:
            rows, codes = additions.codes
            ops.add_rows_(x, rows, self.decoder.embedding(codes))
        return self._rows(x, batch, caches)

    def choose(self, inputs: FrameInputs, frame_caches: Sequence[Cache]) -> tuple[list[Tensor], Tensor]:
        first = self.decoder.embedding(inputs.first)
        return self.predictor(inputs.past, first, inputs.choice, inputs.passes, frame_caches)

    def speak(self, batch: Batch, codes: Tensor, caches: Sequence[Cache]) -> TalkerRows:
        return self._rows(ops.add(codes, self._text(batch)), batch, caches)

    def _text(self, batch: Batch) -> Tensor:
        return self.text_projection(self._embed(batch.token_ids))

    def _rows(self, x: Tensor, batch: Batch, caches: Sequence[Cache]) -> TalkerRows:
        hidden = self.decoder.hidden(x, batch, caches)
        return TalkerRows(self.decoder.head(hidden), hidden)
