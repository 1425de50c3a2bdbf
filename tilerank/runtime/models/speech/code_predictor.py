"""The code predictor of Qwen3-Omni (arXiv 2509.17765): from a frame's first code to all of them, one after the other.

    x = [talker's last hidden state, embedding(code 0)]
    code j = a choice from head j (decoder(x));  x = [..., embedding j (code j)]        for each other code

The decoder is that of Qwen3, a few layers deep. It forgets everything after a frame, so a sequence has one page, and a
frame is as many passes as there are other codes, each of one row and the first of two.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.loader.fields import Fields
from tilerank.parallel.cost import Cost
from tilerank.parallel.embedding import ParallelLMHead
from tilerank.parallel.parameters import Layer, PlainParameter
from tilerank.parallel.sharding import Sharding

from ...step.cache import Cache
from ...step.speaker import CodeSampling, Passes
from ..attention import SelfAttention
from ..decoder import DecoderLayers, DecoderNames
from ..gated_mlp import GatedMLP
from ..text_config import MAX_WIDTH, read_text_config

MAX_CODES = PAGE_TOKENS
"""Codes of a frame: the tokens of a frame fit in a page."""


class CodeEmbedding(Layer):
    """The embedding table of one code, whole on every rank: ids[m] int64 -> [m, hidden]."""

    def __init__(self, name: str, codes: int, hidden: int, sharding: Sharding) -> None:
        self.table = PlainParameter((codes, hidden), sharding.dtype)
        self.table.fill(f"{name}.weight", (codes, hidden), slice(0, codes), slice(0, hidden))

    def __call__(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.table.data)

    def cost(self) -> Cost:
        """Nothing: a frame reads one row, not the table."""
        return Cost()


class CodePredictor(Layer):
    """Chooses the other codes of frames. codes: of a frame, the first included."""

    def __init__(self, name: str, fields: Fields, hidden: int, sharding: Sharding) -> None:
        """hidden: of the talker. Raises ConfigError."""
        c = read_text_config(fields)
        if c.hidden_size != hidden:
            raise fields.fail("hidden_size", f"that of the talker, {hidden}")
        self.codes = fields.integer("num_code_groups", 2, MAX_CODES)
        vocab = fields.integer("vocab_size", 1, MAX_WIDTH)
        bias = fields.flag("attention_bias")
        # A rank reads at most a page of a sequence.
        small = replace(sharding, cached_tokens=PAGE_TOKENS, kv_dtype=None)
        names = DecoderNames(layer=f"{name}.model.layers.{{}}", norm=f"{name}.model.norm")

        def mixer(name: str, _: int) -> SelfAttention:
            return SelfAttention(name, c, small, qkv_bias=bias, out_bias=bias, head_norms=True)

        def mlp(name: str, _: int) -> GatedMLP:
            return GatedMLP(name, c.hidden_size, c.intermediate_size, small)

        self.decoder = DecoderLayers(c, self.codes, small, names, mixer, mlp)
        others = range(self.codes - 1)
        self.embeddings = [CodeEmbedding(f"{name}.model.codec_embedding.{i}", vocab, hidden, small) for i in others]
        self.heads = [ParallelLMHead(f"{name}.lm_head.{i}", hidden, vocab, small) for i in others]
        self._hidden = hidden

    def __call__(
        self, past: Tensor, first: Tensor, choice: CodeSampling, passes: Passes, caches: Sequence[Cache]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the other codes, [m] int64 each, and the sum of the embeddings of all codes, [m, hidden].

        past: [m, hidden], the last hidden states of the talker, after its norm. first: [m, hidden], the embeddings of
        the first codes. passes: those of m frames. caches: with at least m pages.
        """
        x = core.empty((2 * past.shape[0], self._hidden), past.dtype)
        ops.put_rows_(x, passes.past, past)
        ops.put_rows_(x, passes.first, first)
        codes, count = [], past.shape[0]
        # The layers overwrite their rows.
        summed = core.empty((self.codes, count, self._hidden), past.dtype)
        ops.put_rows_(summed[0], passes.frames, first)
        for i, (batch, head, embedding) in enumerate(zip(passes.batches, self.heads, self.embeddings, strict=True)):
            logits = head(self.decoder.hidden(x, batch, caches))
            code = ops.sample(logits, choice.temperature, choice.top_k, choice.top_p, choice.min_p, choice.draws[i])
            x = embedding(code)
            codes.append(code)
            ops.put_rows_(summed[i + 1], passes.frames, x)
        return codes, ops.sum_parts(summed)

    def cost(self) -> Cost:
        """Return the cost of a frame, which counts as one token: every pass reads the layers and a head."""
        layers = self.decoder.cost()
        second_row = Cost(token=layers.token, elementwise=layers.elementwise)  # of the first pass
        passes = Cost.total([layers] * (self.codes - 1)) + second_row
        return passes + Cost.total(head.cost() for head in self.heads)
