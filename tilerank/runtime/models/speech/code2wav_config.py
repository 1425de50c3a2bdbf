"""The fields of config.json of code2wav, which turns codes of speech into samples."""

from dataclasses import dataclass
from math import prod

from tilerank.loader.fields import Fields
from tilerank.loader.rope import RopeConfig, read_rope

from ..text_config import MAX_WIDTH, read_heads

_MAX_DEPTH = 1 << 10
_MAX_RATE = 1 << 10
_MAX_STAGES = 8


@dataclass(frozen=True)
class Code2WavConfig:
    """The shape of code2wav. groups: codes of a frame, each one of `codes`. window: frames that a frame attends to,
    itself included. ratios: by which the stages before the decoder lengthen a sound; rates: those of the decoder, each
    of which halves its channels."""

    depth: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    window: int
    attention_bias: bool
    eps: float
    rope: RopeConfig
    groups: int
    codes: int
    channels: int
    ratios: tuple[int, ...]
    rates: tuple[int, ...]

    @property
    def frame_samples(self) -> int:
        return prod(self.ratios) * prod(self.rates)


def read_code2wav_config(c: Fields, groups: int) -> Code2WavConfig:
    """Read and check the fields. Raises ConfigError, also for what would change the result if ignored.

    groups: codes of a frame of the talker.
    """
    if c.text("hidden_act") != "silu":
        raise c.fail("hidden_act", "'silu'")
    if c.integer("num_quantizers", 1, 1 << 10) != groups:
        raise c.fail("num_quantizers", f"the {groups} codes of a frame of the talker")
    hidden, heads, head_dim = read_heads(c, "hidden_size", "num_attention_heads")
    kv_heads = c.integer("num_key_value_heads", 1, heads)
    if heads % kv_heads:
        raise c.fail("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    ratios, rates = _factors(c, "upsampling_ratios"), _factors(c, "upsample_rates")
    channels = c.integer("decoder_dim", 1, MAX_WIDTH)
    if channels % (1 << len(rates)):
        raise c.fail("decoder_dim", f"a multiple of {1 << len(rates)}, since {len(rates)} stages halve it")
    return Code2WavConfig(
        depth=c.integer("num_hidden_layers", 1, _MAX_DEPTH),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=c.integer("intermediate_size", 1, MAX_WIDTH),
        window=c.integer("sliding_window", 1, 1 << 16),
        attention_bias=c.flag("attention_bias"),
        eps=c.number("rms_norm_eps", 0.0, 1.0),
        rope=read_rope(c, head_dim),
        groups=groups,
        codes=c.integer("codebook_size", 1, MAX_WIDTH),
        channels=channels,
        ratios=ratios,
        rates=rates,
    )


def _factors(c: Fields, key: str) -> tuple[int, ...]:
    values = c.values.get(key)
    if (
        not isinstance(values, list)
        or not 0 < len(values) <= _MAX_STAGES
        or any(type(value) is not int or not 1 < value <= _MAX_RATE for value in values)
    ):
        raise c.fail(key, f"1 to {_MAX_STAGES} integers from 2 to {_MAX_RATE}")
    return tuple(values)
