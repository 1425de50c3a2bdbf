"""`tilerank bench make-model`: writes a checkpoint of random weights in the shape of a public model."""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..options.arguments import whole_number
from .public import PUBLIC_MODELS, PublicProcessor, public_config, public_processor

# In a checkout of the repository. The installed package contains no model; the checkpoint then gets no tokenizer.
_ASSETS = Path(__file__).resolve().parents[3] / "assets"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_TEXT_LAYERS = "num_hidden_layers"
_DENSE_LAYERS = "first_k_dense_replace"
_CROSSING = "cross_attention_layers"
_TAKEN = "intermediate_layers_indices"
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_KINDS = "layer_types"
_TOKENS_OF_FIELDS = {
    "audio_end_token_id": "<|audio_end|>",
    "audio_start_token_id": "<|audio_start|>",
    "audio_token_id": "<|audio_pad|>",
    "image_token_index": "<|image|>",
}
_SPECIAL_IDS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="the directory to create")
    parser.add_argument("--like", choices=PUBLIC_MODELS, required=True, help="the public model to imitate")
    parser.add_argument(
        "--layers", type=whole_number(1), metavar="N", help="number of layers (default: as the public model)"
    )
    parser.add_argument(
        "--experts", type=whole_number(1), metavar="N", help="experts of each mixture (default: as the public model)"
    )
    parser.add_argument(
        "--vision-layers",
        type=whole_number(1),
        metavar="N",
        help="number of layers of the vision tower (default: as the public model)",
    )
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N", help="seed of the random weights (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    out: Path = args.out
    config = public_config(args.like)
    _set_layers(config, args)
    _set_experts(config, args)
    if out.exists():
        raise LaunchError(f"OUT_DIR: {out} exists; expected a directory that does not exist yet")
    if not out.absolute().parent.is_dir():
        raise LaunchError(f"OUT_DIR: {out} cannot be created: {out.absolute().parent} is not a directory")
    # A temporary name until the checkpoint is complete: a directory named OUT_DIR can always be loaded.
    partial_dir = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}-"))
    try:
        summary = _write_checkpoint(partial_dir, config, args.seed)
        partial_dir.chmod(0o755)
        partial_dir.rename(out)
    except BaseException:
        shutil.rmtree(partial_dir, ignore_errors=True)
        raise
    print(f"{out}: random weights in the shape of {args.like}, {', '.join(summary)}")
    return 0


def _set_layers(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Set the numbers of layers that were asked for. Raises LaunchError."""
    text, vision = _text(config), _model(config).get("vision_config")
    if args.layers is not None:
        _check_layers("--layers", args.layers, text[_TEXT_LAYERS], "layers", args.like)
        if _DENSE_LAYERS in text:
            text[_DENSE_LAYERS] = min(text[_DENSE_LAYERS], args.layers // 2)  # some layers keep their mixture
        text[_TEXT_LAYERS] = args.layers
    if _KINDS in text:
        text[_KINDS] = text[_KINDS][: text[_TEXT_LAYERS]]
    if _CROSSING in text:  # the last layer is self-attention
        text[_CROSSING] = [layer for layer in text[_CROSSING] if layer < text[_TEXT_LAYERS] - 1]
    if args.vision_layers is not None:
        if vision is None:
            raise LaunchError(f"--vision-layers: expected a model with a vision tower, found {args.like}")
        _set_vision_layers(vision, args.vision_layers, args.like)
    if vision and "depth" in vision:
        # Each DeepStack level belongs to a layer of the text but the last, and a talker reads a layer between them.
        levels = text[_TEXT_LAYERS] - (2 if "talker_config" in config else 1)
        vision["deepstack_visual_indexes"] = vision["deepstack_visual_indexes"][:levels]
    if "talker_config" in config:
        _set_talker_layers(config["talker_config"], text[_TEXT_LAYERS], args.like)


def _set_talker_layers(talker: dict[str, Any], layers: int, like: str) -> None:
    """Set the layers of a talker that go with `layers` of the text."""
    if layers < 2:
        raise LaunchError(f"--layers: expected at least 2 for {like}, whose talker reads a layer before the last")
    talker["accept_hidden_layer"] = min(talker["accept_hidden_layer"], layers - 1)
    talker["text_config"][_TEXT_LAYERS] = min(talker["text_config"][_TEXT_LAYERS], layers)


def _set_vision_layers(vision: dict[str, Any], layers: int, like: str) -> None:
    depth, taken = ("depth", "deepstack_visual_indexes") if "depth" in vision else (_TEXT_LAYERS, _TAKEN)
    _check_layers("--vision-layers", layers, vision[depth], "layers of the vision tower", like)
    vision[taken] = _spread(vision[taken], vision[depth], layers)
    if taken == _TAKEN:
        vision["vision_output_dim"] = vision["hidden_size"] * (1 + len(vision[taken]))
        vision["num_global_layers"] = -(-vision["num_global_layers"] * layers // vision[depth])
    vision[depth] = layers


def _check_layers(option: str, layers: int, most: int, name: str, like: str) -> None:
    if layers > most:
        raise LaunchError(f"{option}: expected at most the {most} {name} of {like}, found {layers}")


def _set_experts(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Set the number of experts that was asked for. Raises LaunchError."""
    if args.experts is None:
        return
    text = _text(config)
    key = next((key for key in _EXPERTS if key in text), None)
    if key is None:
        raise LaunchError(f"--experts: expected a mixture of experts, found {args.like}")
    chosen, groups = text["num_experts_per_tok"], text.get("n_group", 1)
    least = -(-chosen // text.get("topk_group", 1)) * groups
    if not least <= args.experts <= text[key] or args.experts % groups:
        raise LaunchError(
            f"--experts: expected {least} to {text[key]} in multiples of {groups} for {args.like}, found {args.experts}"
        )
    text[key] = args.experts


def _spread(indexes: list[int], depth: int, new_depth: int) -> list[int]:
    """Return the layers at the same shares of a lower tower, each layer once."""
    return sorted({i for index in indexes if (i := (index + 1) * new_depth // depth - 1) >= 0})


def _model(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the whole model, or of the part that reads."""
    part: dict[str, Any] = config.get("thinker_config", config)
    return part


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model."""
    part: dict[str, Any] = _model(config).get("text_config", config)
    return part


def _write_checkpoint(model_dir: Path, config: dict[str, Any], seed: int) -> list[str]:
    """Write config, weights, tokenizer and the processor's settings into `model_dir`; return a summary."""
    from tilerank.loader.random_weights import write_random_weights

    layers = f"{_text(config)[_TEXT_LAYERS]} layers"
    if vision := _model(config).get("vision_config"):
        layers += f" and {vision.get('depth') or vision[_TEXT_LAYERS]} of the vision tower"
    processor = public_processor(config["model_type"])
    tokenizer = _copy_tokenizer(model_dir, config, processor)
    for name, content in {"config.json": config, **processor.files}.items():
        (model_dir / name).write_text(json.dumps(content, indent=2) + "\n")
    shapes = _shapes(model_dir)
    total = write_random_weights(model_dir, shapes, seed)
    return [layers, f"{len(shapes)} tensors", f"{total / 1e9:.2f} GB", tokenizer]


def _shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that tilerank's model of this config loads, by name.

    Experts are in one tensor where the family publishes them so.
    """
    import torch

    from tilerank.parallel.sharding import Sharding
    from tilerank.runtime.rank.registry import build_model, read_supported_card

    model = build_model(read_supported_card(model_dir), Sharding(0, 1, torch.bfloat16, None))
    return dict(
        (one.places[0].name, one.places[0].shape) if one.places else (one.name, one.shape) for one in model.rectangles()
    )


def _copy_tokenizer(model_dir: Path, config: dict[str, Any], processor: PublicProcessor) -> str:
    """Copy a demo model's tokenizer, if it exists and fits the vocabulary, and set its special tokens in `config`.

    Returns a phrase for the summary.
    """
    demo = _ASSETS / ("demo-vl" if "vision_config" in _model(config) else "demo-lm")
    if not demo.is_dir():
        return f"no tokenizer (assets/{demo.name} was not found)"
    demo_config = json.loads((demo / "config.json").read_text())
    if _text(demo_config)["vocab_size"] > _text(config)["vocab_size"]:
        return "no tokenizer (the demo model's is larger than the vocabulary)"
    for name in _TOKENIZER_FILES:
        if (demo / name).is_file():
            text = (demo / name).read_text(encoding="utf-8")
            for token, renamed in processor.demo_tokens.items():
                text = text.replace(token, renamed)
            if name == "tokenizer_config.json":
                text = json.dumps(json.loads(text) | processor.tokenizer_config, indent=2)
            (model_dir / name).write_text(text, encoding="utf-8")
    for found, part in ((demo_config, _model(config)), (_text(demo_config), _text(config))):
        part |= {name: found[name] for name in _SPECIAL_IDS if name in found}
    added = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    _model(config).update({key: ids[token] for key, token in _TOKENS_OF_FIELDS.items() if key in _model(config)})
    if "talker_config" in config:
        _set_speech_tokens(config, ids, model_dir)
    return "the demo model's tokenizer"


def _set_speech_tokens(config: dict[str, Any], ids: dict[str, int], model_dir: Path) -> None:
    """Set the tokens by which a talker finds turns. A role is found by its first token, since it has several here."""
    from tilerank.loader.tokenizer import Tokenizer

    tokenizer = Tokenizer(model_dir)
    config |= {f"{token}_token_id": ids[f"<|{token}|>"] for token in ("im_start", "im_end")}
    config |= {f"{role}_token_id": tokenizer.encode(role)[0] for role in ("assistant", "system", "user")}
    talker, thinker = config["talker_config"], config["thinker_config"]
    talker |= {key: thinker[key] for key in ("audio_token_id", "image_token_id", "video_token_id")}
