"""The settings of the APIs, from options and a model: those of a server, and of a process that needs no HTTP."""

import argparse
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

from tilerank.loader.card import ModelCard, read_card
from tilerank.loader.generation_config import SamplingDefaults, read_sampling_defaults
from tilerank.loader.quantization_config import held_codes
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.registry import family_of, load_processor, with_options
from tilerank.runtime.protocol.speech_settings import voices_of
from tilerank.runtime.server.apis.service import ServerSettings
from tilerank.runtime.server.chat.formats import answer_format
from tilerank.runtime.server.chat.text_encoder import TextEncoder

from ..options import model
from . import media_options

log = logging.getLogger(__name__)


def server_settings(
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    encoder: TextEncoder,
    check_grammar: Callable[[str], Awaitable[None]],
    *,
    names: tuple[str, ...],
    version: str,
    api_keys: tuple[str, ...] = (),
    strict_fields: bool = True,
    open_metrics: bool = False,
) -> ServerSettings:
    """Return the settings of the APIs for the model of `args`, whose tokenizer is `tokenizer`.

    The other arguments are those of ServerSettings.
    """
    model_dir = model.model_directory(args)
    options = model.model_options(args)
    card = with_options(read_card(model_dir), options.family)
    family = family_of(card.model_type)
    return ServerSettings(
        names,
        version,
        api_keys,
        _sampling(model_dir, args.override_generation_config),
        answer_format(tokenizer, family.tool_calls),
        check_grammar,
        media_options.media_reader(args, load_processor(model_dir, tokenizer)),
        encoder,
        _weights(options, card),
        voices_of(card),
        args.default_chat_template_kwargs,
        card.pooling,
        family.pairs,
        strict_fields,
        args.seed,
        open_metrics,
    )


def _weights(options: model.ModelOptions, card: ModelCard) -> str:
    """Return the format in which ranks hold the projections, for the status page."""
    floats = card.dtype if options.dtype == "auto" else options.dtype
    return held_codes(card.quantization, options.quantization) or ("float32" if floats == "float32" else "bfloat16")


def _sampling(model_dir: Path, override: dict[str, float]) -> SamplingDefaults:
    """Return the sampling values of requests without any, and log what of them differs from the defaults."""
    advised, plain = read_sampling_defaults(model_dir, override), asdict(SamplingDefaults())
    found = ", ".join(f"{name} {value:g}" for name, value in asdict(advised).items() if value != plain[name])
    source = "generation_config.json" + " and --override-generation-config" * bool(override)
    if found:
        log.info("requests that do not say otherwise are sampled as %s say: %s", source, found)
    return advised
