"""`tilerank bench make-model`: writes a checkpoint of random weights in the shape of a public model."""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..start import whole_number

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "vocab_size": 151936,
}

# The fields of the public models' config.json that affect the computation.
PUBLIC_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "llama-3.2-3b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "dtype": "bfloat16",
        "eos_token_id": 128001,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
}

# In a checkout of the repository. The installed package contains no model; the checkpoint then gets no tokenizer.
TOKENIZER = Path(__file__).resolve().parents[3] / "assets" / "demo-lm"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="the directory to create")
    parser.add_argument("--like", choices=sorted(PUBLIC_CONFIGS), required=True, help="the public model to imitate")
    parser.add_argument(
        "--layers", type=whole_number(1), metavar="N", help="number of layers (default: as the public model)"
    )
    parser.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N", help="seed of the random weights (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    out: Path = args.out
    config = dict(PUBLIC_CONFIGS[args.like])
    if args.layers is not None:
        max_layers = config["num_hidden_layers"]
        if args.layers > max_layers:
            raise LaunchError(f"--layers: expected at most the {max_layers} layers of {args.like}, found {args.layers}")
        config["num_hidden_layers"] = args.layers
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


def _write_checkpoint(model_dir: Path, config: dict[str, Any], seed: int) -> list[str]:
    """Write config, weights and tokenizer into `model_dir`; return a summary of its contents."""
    from tilerank.loader.random_weights import write_random_weights

    layers = f"{config['num_hidden_layers']} layers"
    tokenizer = _copy_tokenizer(model_dir, config)
    (model_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shapes = _shapes(model_dir)
    total = write_random_weights(model_dir, shapes, seed)
    return [layers, f"{len(shapes)} tensors", f"{total / 1e9:.2f} GB", tokenizer]


def _shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that tilerank's model of this config loads, by name."""
    import torch

    from tilerank.parallel.sharding import Sharding
    from tilerank.runtime.registry import build_model, read_supported_card

    model = build_model(read_supported_card(model_dir), Sharding(0, 1, torch.bfloat16, None))
    return {rectangle.name: rectangle.shape for rectangle in model.rectangles()}


def _copy_tokenizer(model_dir: Path, config: dict[str, Any]) -> str:
    """Copy the demo model's tokenizer, if it exists and fits the vocabulary, and set its special tokens in `config`.

    Returns a phrase for the summary.
    """
    if not TOKENIZER.is_dir():
        return "no tokenizer (assets/demo-lm was not found)"
    demo_config = json.loads((TOKENIZER / "config.json").read_text())
    if demo_config["vocab_size"] > config["vocab_size"]:
        return "no tokenizer (the demo model's is larger than the vocabulary)"
    for name in _TOKENIZER_FILES:
        shutil.copyfile(TOKENIZER / name, model_dir / name)
    config |= {name: demo_config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return "the demo model's tokenizer"
