"""The decoder of all text models: an embedding, layers, a last norm and the output head. A layer is a mixer and an MLP.

    x += mixer(norm(x));  x += mlp(norm(x))        per layer, then the last norm and the head

Each of the two may have a norm after it as well, of its sum over the ranks: x += post_norm(mixer(norm(x))). OLMo 3 has
these alone: x += post_norm(mixer(x)). A layer may end with an input of its own (per_layer_inputs.py) and a factor of
the whole stream (Gemma 4).

A family composes a Decoder from mixers and MLPs and gives the names under which its checkpoints store them.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.heads import join_heads, split_heads
from tilerank.loader.card import ModelCard
from tilerank.loader.headers import stored_tensors
from tilerank.loader.tied_head import tied_module
from tilerank.parallel.cost import Cost
from tilerank.parallel.embedding import ParallelLMHead, TiedEmbedding, VocabParallelEmbedding
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.parameters import Layer, WholeParameter
from tilerank.parallel.sharding import Sharding

from ..step.batch import Batch, LogitRows
from ..step.cache import Budget, Cache, CacheSpec
from ..step.model import DraftHead, Encoder, KeptStates, Model
from ..step.rope import RopeTable, Rotation
from .per_layer_inputs import PerLayerInput, PerLayerInputs
from .stream import Stream
from .text_config import TextConfig


@dataclass(frozen=True)
class DecoderNames:
    """Names of the modules in a checkpoint; the default is the layout of Llama and Qwen.

    `layer` has a place for the number of the layer; the seven after it are relative to the layer. mixer: one name, or
    one for each layer. mixer_norm, mlp_norm: None in a family without norms before the mixer and the MLP.
    mixer_post_norm, mlp_post_norm: None in a family without norms after them. scale: None in a family without a factor
    of the stream. left_out: beginnings of the names of tensors that the model does not use; layers whose tensors are
    left out are not built. drafts: the checkpoint may have layers after the last, which predict several tokens at once;
    all but those of a draft head are not used.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}"
    mixer_norm: str | None = "input_layernorm"
    mixer: str | Sequence[str] = "self_attn"
    mixer_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp: str = "mlp"
    mlp_post_norm: str | None = None
    scale: str | None = None
    left_out: tuple[str, ...] = ()
    drafts: bool = False

    def is_after(self, name: str, num_layers: int) -> bool:
        """Return whether a tensor belongs to a layer after the last of `num_layers`."""
        before, _ = self.layer.split("{}")
        number, _, _ = name.removeprefix(before).partition(".")
        return name.startswith(before) and number.isdecimal() and int(number) >= num_layers

    def of_base_model(self) -> "DecoderNames":
        """Return the names in a checkpoint of the layers alone, which lack the prefix that those with a head have."""
        of_parts: dict[str, Any] = {
            field.name: value.removeprefix("model.")
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), str)
        }
        return replace(self, **of_parts)


C = TypeVar("C", bound=Cache)


class Mixer(Layer, Generic[C]):
    """The part of a layer that mixes tokens, such as self-attention, over a cache of kind C.

    cache_spec: what it keeps of a sequence. rotation: of its queries and keys; None: that of the decoder.
    rotates_source: whether it is cross-attention that rotates keys. both_sides: whether tokens attend to later ones,
    and reach: to how many after them, if not to all.
    """

    cache_spec: CacheSpec
    rotation: Rotation | None = None
    rotates_source: bool = False
    both_sides: bool = False
    reach: int = 0

    def store_source(self, rows: Tensor, rope: Tensor | None, slots: Tensor, cache: C) -> None:
        """Store what the layer keeps of encodings (model.py: Model.store_source): nothing but in cross-attention."""

    def is_idle(self, batch: Batch) -> bool:
        """Return whether the layer leaves every row of the batch as it is, so that it need not be computed."""
        return False

    @abstractmethod
    def __call__(self, x: Tensor, rope: Tensor, batch: Batch, cache: C, only: LogitRows | None = None) -> Tensor:
        """x[t, hidden] -> this rank's part of [t, hidden], a sum over the ranks.

        rope: [t, 2, r / 2], the rows that queries and keys are rotated with. With `only`, the result has those
        m rows alone, [m, hidden], while the cache gets all t tokens.
        """


class FeedForward(Layer):
    """The part of a layer that treats every token alone: x[t, hidden] -> this rank's part of [t, hidden]."""

    reads_residual: Literal[False] = False

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...


class ResidualFeedForward(Layer):
    """A FeedForward that reads the residual as well: x, its norm, and residual [t, hidden] -> [t, hidden], the whole
    result on every rank."""

    reads_residual: Literal[True] = True

    @abstractmethod
    def __call__(self, x: Tensor, residual: Tensor) -> Tensor: ...


MLP = FeedForward | ResidualFeedForward


class RowGate(Layer):
    """Scales the output of an MLP, and hides rows of it."""

    @abstractmethod
    def __call__(self, x: Tensor, batch: Batch) -> None:
        """Change x[t, hidden], this rank's part of a sum over the ranks, in place."""


@dataclass(eq=False)
class DecoderLayer(Layer):
    """A mixer and an MLP, each after a norm, if it has one.

    mixer_post_norm, mlp_post_norm: of the sums of both over the ranks, if it has any. mlp_gate: of the output of the
    MLP, if it has any. input: what is added after the MLP, if it has any. scale: [1], a factor of the stream at the end
    of the layer, if it has any.
    """

    mixer_norm: RMSNorm | None
    mixer: Mixer[Any]
    mixer_post_norm: RMSNorm | None
    mlp_norm: RMSNorm | None
    mlp: MLP
    mlp_post_norm: RMSNorm | None
    mlp_gate: RowGate | None
    input: PerLayerInput | None
    scale: WholeParameter | None


class DecoderLayers(Layer):
    """The layers of a decoder and the norm after them, over rows of any origin."""

    def __init__(
        self,
        config: TextConfig,
        positions: int,
        sharding: Sharding,
        names: DecoderNames,
        mixer: Callable[[str, int], Mixer[Any]],
        mlp: Callable[[str, int], MLP],
        mlp_gate: Callable[[int], RowGate | None] = lambda _: None,
        inputs: PerLayerInputs | None = None,
    ) -> None:
        """positions: the tables of rotations have so many. mixer, mlp: make those of a layer, from the name of the
        module and the number of the layer. mlp_gate: makes that of a layer, from its number. inputs: of all layers, if
        they have inputs of their own."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._ranks = sharding.size
        self.inputs = inputs

        def norm(name: str) -> RMSNorm:
            return RMSNorm(name, hidden, eps, sharding, zero_centered=config.zero_centered_norms)

        def norm_of(layer: str, name: str | None) -> RMSNorm | None:
            return None if name is None else norm(f"{layer}.{name}")

        def layer(number: int) -> DecoderLayer:
            name = names.layer.format(number)
            mixer_name = names.mixer if isinstance(names.mixer, str) else names.mixer[number]
            return DecoderLayer(
                norm_of(name, names.mixer_norm),
                mixer(f"{name}.{mixer_name}", number),
                norm_of(name, names.mixer_post_norm),
                norm_of(name, names.mlp_norm),
                mlp(f"{name}.{names.mlp}", number),
                norm_of(name, names.mlp_post_norm),
                mlp_gate(number),
                None if inputs is None else inputs.of_layer(name, number),
                None if names.scale is None else WholeParameter(f"{name}.{names.scale}", (1,), sharding.dtype),
            )

        names_of_layers = (f"{names.layer.format(number)}." for number in range(config.num_layers))
        self.layers = [
            layer(number) for number, name in enumerate(names_of_layers) if not name.startswith(names.left_out)
        ]
        self.norm = norm(names.norm)
        stores = [layer.mixer.cache_spec.budget is not Budget.SHARED for layer in self.layers]
        self._stored = max((i + 1 for i, each in enumerate(stores) if each), default=0)
        """The layers before this one store something; those from it on read caches of others."""
        usual = Rotation(config.rope, config.rotary_dim)
        rotations = [layer.mixer.rotation or usual for layer in self.layers]
        different = list(dict.fromkeys(rotations))
        self._rope_of = [different.index(rotation) for rotation in rotations]
        self.ropes = [RopeTable(each.rope, each.dim, positions, sharding.dtype) for each in different]

    def _rope_rows(self, positions: Tensor) -> list[Tensor]:
        """positions [axes, t] int64 -> for each rotation [t, 2, r / 2], the rows that rotate queries and keys."""
        return [table.rows(positions) for table in self.ropes]

    def cache_specs(self) -> list[CacheSpec]:
        return [layer.mixer.cache_spec for layer in self.layers]

    def hidden(self, x: Tensor, batch: Batch, caches: Sequence[Cache]) -> Tensor:
        """x[t, hidden], which is overwritten -> the normalised rows whose logits are computed, [m, hidden].

        The last layer computes rows without logits only as far as their cache. Layers after the last one that stores
        something do not compute them.
        """
        inserts, kept, asked = batch.inserts, batch.kept, batch.hidden
        inputs = None if self.inputs is None else self.inputs(x, batch)
        stream = Stream(x, self._ranks)
        ropes = self._rope_rows(batch.positions)
        used = [i for i, layer in enumerate(self.layers) if not layer.mixer.is_idle(batch)]
        if asked is not None:
            asked.set(asked.among(range(used[0] + 1)), stream.rows(), is_cut=False)
        x = stream.normed(self.layers[used[0]].mixer_norm)
        next_norms = [self.layers[i].mixer_norm for i in used[1:]] + [self.norm]
        last, has_all_rows = len(self.layers) - 1, True
        for i, next_norm, following in zip(used, next_norms, [*used[1:], len(self.layers)], strict=True):
            layer, cache = self.layers[i], caches[i]
            if i == self._stored and (only := batch.logit_rows) is not None:
                stream.keep(only)
                has_all_rows = False
                x, batch = only.take(x), batch.last_rows()
                ropes = [split_heads(only.take(join_heads(rows)), 0, *rows.shape[1:]) for rows in ropes]
                inputs = None if inputs is None else only.take(inputs)
            only = batch.logit_rows if i == last else None
            x = layer.mixer(x, ropes[self._rope_of[i]], batch, cache, only)
            if only is not None:
                stream.keep(only)
                inputs = None if inputs is None else only.take(inputs)
            mlp = layer.mlp
            x = stream.add(x, layer.mlp_norm, post_norm=layer.mixer_post_norm, update_all=mlp.reads_residual)
            x = mlp(x, stream.rows()) if mlp.reads_residual else mlp(x)
            if layer.mlp_gate is not None:
                layer.mlp_gate(x, batch)
            keeps = kept is not None and i + 1 == kept.layer
            inserted = inserts.deep[i] if inserts is not None and i < len(inserts.deep) else None
            is_cut = batch.logit_rows is not None and i + 1 == min(last, self._stored)
            # Layers that are left out end with what the last one before them has.
            after = [] if asked is None else asked.among(range(i + 1, min(following, last) + 1))
            is_read = keeps or inserted is not None or is_cut or bool(after)
            scale, summed, post_norm = layer.scale, mlp.reads_residual, layer.mlp_post_norm
            if layer.input is not None:
                stream.add(x, next_norm, post_norm=post_norm, update_all=True, summed=summed)
                assert inputs is not None
                x, summed, post_norm = layer.input(stream.rows(), inputs), False, layer.input.post_norm
            x = stream.add(x, next_norm, post_norm=post_norm, scale=scale, update_all=is_read, summed=summed)
            if kept is not None and keeps:
                kept.hidden = ops.take_rows(stream.rows(), kept.rows)
            if asked is not None and after:
                asked.set(after, stream.rows(), is_cut=not has_all_rows)
            if inserted is not None:
                stream.insert(*inserted)
                x = stream.normed(next_norm)
        if asked is not None:
            asked.set(asked.among(range(last + 1, last + 2)), x, is_cut=len(x) == len(asked.own))
        return x


class Decoder(DecoderLayers, Model):
    """A decoder-only language model, of text alone or with an encoder of media. One that embeds or scores texts has no
    output head."""

    def __init__(
        self,
        card: ModelCard,
        config: TextConfig,
        sharding: Sharding,
        names: DecoderNames,
        mixer: Callable[[str, int], Mixer[Any]],
        mlp: Callable[[str, int], MLP],
        encoder: Encoder | None = None,
        *,
        mlp_gate: Callable[[int], RowGate | None] = lambda _: None,
        inputs: PerLayerInputs | None = None,
        draft_head: DraftHead | None = None,
        spare_ids: int = 0,
        embedding_factor: float = 1.0,
        logits_cap: float | None = None,
    ) -> None:
        """mixer, mlp, mlp_gate, inputs: as in DecoderLayers.

        encoder: its encodings have fewer levels beside the embeddings than the decoder has layers. spare_ids: as in
        Model; the embedding has rows for them, and so has the weight of a tied head. embedding_factor: of the
        embeddings of tokens, not of encodings. logits_cap: logits become cap * tanh(logits / cap).
        """
        hidden, vocab = config.hidden_size, card.vocab_size
        self._num_layers = config.num_layers
        directory, announced = card.fields.path.parent, config.tie_word_embeddings
        self._has_head = card.pooling is None
        self._names = names = names if self._has_head else _stored_names(names, directory)
        self._tied = tied_module(directory, names.embedding, names.head, announced=announced)
        self.embedding: VocabParallelEmbedding | TiedEmbedding
        self.head: Callable[[Tensor], Tensor]
        if not self._has_head:
            name = self._tied or names.embedding
            self.embedding = VocabParallelEmbedding(name, vocab + spare_ids, hidden, sharding)
            self.head = lambda x: x
        elif self._tied is not None:
            self.embedding = TiedEmbedding(self._tied, vocab, hidden, sharding, spare_ids=spare_ids)
            self.head = self.embedding.logits
        else:
            self.embedding = VocabParallelEmbedding(names.embedding, vocab + spare_ids, hidden, sharding)
            self.head = ParallelLMHead(names.head, hidden, vocab, sharding)
        super().__init__(config, card.context_length, sharding, names, mixer, mlp, mlp_gate, inputs)
        self.encoder = encoder
        self.draft_head = draft_head
        self.position_axes = config.rope.axes
        self.spare_ids = spare_ids
        self._embedding_factor = embedding_factor
        self._logits_cap = logits_cap if self._has_head else None
        self.whole_texts = any(layer.mixer.both_sides for layer in self.layers)
        self.reach = max(layer.mixer.reach for layer in self.layers)

    def cache_specs(self) -> list[CacheSpec]:
        return super().cache_specs() + ([] if self.draft_head is None else [self.draft_head.cache_spec])

    def forward(self, batch: Batch, caches: Sequence[Cache]) -> Tensor:
        x, inserts = self.embedding(batch.token_ids), batch.inserts
        if self._embedding_factor != 1.0:
            ops.scale_(x, self._embedding_factor)
        if inserts is not None:
            ops.put_rows_(x, inserts.rows, inserts.values)
        if self.draft_head is None:
            x = self.hidden(x, batch, caches)
        else:
            x = self.draft_head.keep(self.hidden(x, replace(batch, logit_rows=None), caches), batch.logit_rows)
        logits = self.head(x)
        if self._logits_cap is not None:
            ops.soft_cap_(logits, self._logits_cap)
        return logits

    def draft(self, batch: Batch, rows: KeptStates, caches: Sequence[Cache]) -> Tensor:
        assert self.draft_head is not None
        head = self.draft_head.vocabulary or self.head
        return head(self.draft_head(self.embedding(batch.token_ids), rows, batch, caches[-1]))

    @property
    def head_module(self) -> str:
        return self._tied or self._names.head

    @property
    def rotates_source(self) -> bool:
        return any(layer.mixer.rotates_source for layer in self.layers)

    def store_source(self, rows: Tensor, positions: Tensor | None, slots: Tensor, caches: Sequence[Cache]) -> None:
        ropes: Sequence[Tensor | None] = [None] * len(self.ropes)
        if positions is not None:
            ropes = self._rope_rows(positions)
        for layer, rope, cache in zip(self.layers, self._rope_of, caches, strict=True):
            layer.mixer.store_source(rows, ropes[rope], slots, cache)

    def cost_without_logits(self) -> Cost:
        if self._stored < len(self.layers) or self.draft_head is not None:
            return Cost.total(layer.cost() for layer in self.layers[: self._stored])
        *layers, last = self.layers
        return Cost.total([*(layer.cost() for layer in layers), last.cost_of_caching()])

    def ignore(self, name: str) -> bool:
        repeats = self._tied == self._names.embedding and name == f"{self._names.head}.weight"
        unused = () if self._has_head else (f"{self._names.head}.", "score.")
        is_spare = name.endswith(".rotary_emb.inv_freq") or repeats or name.startswith(unused)
        if self.draft_head is not None and name.startswith(self.draft_head.module):
            return is_spare or name.startswith(self.draft_head.left_out)
        is_draft = self._names.drafts and self._names.is_after(name, self._num_layers)
        return is_spare or is_draft or name.startswith(self._names.left_out)


def _stored_names(names: DecoderNames, model_dir: Path) -> DecoderNames:
    """Return the names that the checkpoint of a model without a head has."""
    tensors = stored_tensors(model_dir) or {}
    is_base = f"{names.embedding.removeprefix('model.')}.weight" in tensors
    return names.of_base_model() if is_base else names
