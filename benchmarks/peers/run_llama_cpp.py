"""llama.cpp as a peer of benchmarks/compare.py: `python run_llama_cpp.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has llama-cpp-python, and gguf to convert the model. The docstring of
PEERS in benchmarks/compare.py describes WORKLOAD and RESULT. A step is one llama_decode and the argmax of its logits.
Drafts are those of the LlamaPromptLookupDecoding of llama-cpp-python.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ARCHITECTURES = {"gemma3_text": "GEMMA3", "gpt_oss": "GPT_OSS", "llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""gguf's names by model_type."""
PROMPT_ROWS = 2048  # tokens in one llama_decode of a prefill
DRAFTS = 2  # what the documentation of its prompt lookup advises for CPUs
FUSED_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up|down)_proj(|_bias|_blocks|_scales)")
"""The tensors of gpt-oss that hold all experts of a layer, gate and up row by row."""

Row = tuple[int, int, int, bool]
"""Sequence, position, token, and whether the next token is needed (needs_logits)."""
Event = tuple[int, float]
"""Index of a prompt, and the seconds after which it has one more token."""


def tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Yield name and memory-mapped values (bf16 as uint16) of each tensor of a safetensors checkpoint."""
    import numpy

    dtypes = {"BF16": numpy.uint16, "F32": numpy.float32, "U8": numpy.uint8}
    for file in sorted(model.glob("*.safetensors")):
        data = numpy.memmap(file, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        for name, info in json.loads(data[8 : 8 + size].tobytes()).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in info["data_offsets"])
                yield name, data[begin:end].view(dtypes[info["dtype"]]).reshape(info["shape"])


def in_fp32(values: Any) -> Any:
    import numpy

    return values if values.dtype == numpy.float32 else (values.astype(numpy.uint32) << 16).view(numpy.float32)


def converted(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the name on the hub, one weight a matrix, and the values of each tensor of a GGUF: one array, fp32 or bf16
    as uint16, or the blocks and the scales of MXFP4. Those of large tensors are views of the checkpoint."""
    stored, model_type = dict(tensors(model)), config["model_type"]
    if (rope := rotation_of(config))["rope_type"] == "llama3":
        yield "rope_freqs.weight", (rope_factors(rope, head_dim_of(config)),)
    for name, values in stored.items():
        fused = FUSED_EXPERTS.fullmatch(name)
        if fused is not None:
            if fused[3] != "_scales":
                yield from converted_experts(stored, fused)
        elif model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp stores the two rows of a rotated pair next to each other.
            pairs = values.reshape(-1, 2, head_dim_of(config) // 2, values.shape[-1])
            yield name, (pairs.swapaxes(1, 2).reshape(values.shape),)
        elif model_type == "gemma3_text" and name.endswith("norm.weight"):
            yield name, (in_fp32(values) + 1,)
        elif name.endswith(".sinks"):
            yield f"{name}.weight", (in_fp32(values),)
        elif values.ndim == 1 or ".router." in name:
            yield name, (in_fp32(values),)
        else:
            yield name, (values,)


def converted_experts(stored: dict[str, Any], fused: re.Match[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the parts of a tensor of gpt-oss: gate and up, which take turns in its rows, or down."""
    prefix, matrix, suffix = fused.groups()
    values = stored[fused[0]]
    arrays: tuple[Any, ...]
    if suffix == "_blocks":
        arrays = values, stored[fused[0].replace("_blocks", "_scales")]
    elif suffix == "_bias":
        arrays = (in_fp32(values),)
    else:  # the only ones that are [experts, inputs, outputs]
        arrays = (values.swapaxes(1, 2),)
    kind = "bias" if suffix == "_bias" else "weight"
    for part, first in (("gate", 0), ("up", 1)) if matrix == "gate_up" else (("down", None),):
        rows = arrays if first is None else tuple(array[:, first::2] for array in arrays)
        yield f"{prefix}{part}_proj.{kind}", rows


def mxfp4_blocks(codes: Any, scales: Any) -> Any:
    """Return MXFP4 as a GGUF has it: each scale before its codes, of which byte i holds numbers i and i + 16. The bytes
    of a checkpoint hold numbers 2 i and 2 i + 1."""
    import numpy

    nibbles = numpy.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], 32)
    packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    return numpy.concatenate((scales[..., None], packed), -1).reshape(*codes.shape[:2], -1)


def head_dim_of(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def convert(model: Path, config: dict[str, Any], target: Path) -> None:
    """Write the model as GGUF: matrices unchanged, anything else in fp32, no tokenizer. Does nothing if `target`
    exists."""
    if target.exists():
        return
    import gguf
    import numpy

    model_type = config["model_type"]
    if model_type not in ARCHITECTURES:
        sys.exit(f"converting for llama.cpp: expected model_type in {', '.join(ARCHITECTURES)}, found {model_type}")
    arch = gguf.MODEL_ARCH[ARCHITECTURES[model_type]]
    partial_file = target.with_suffix(".part")
    writer = gguf.GGUFWriter(partial_file, gguf.MODEL_ARCH_NAMES[arch])
    add_sizes(writer, config)
    add_rotation(writer, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    types = gguf.GGMLQuantizationType
    for name, (values, *scales) in converted(model, config):
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            sys.exit(f"llama.cpp has no name for {name}")
        if scales:
            shape = (*values.shape[:2], values.shape[2] * 17)
            writer.add_tensor_info(gguf_name, shape, numpy.uint8, math.prod(shape), types.MXFP4)
        else:
            raw = types.BF16 if values.dtype == numpy.uint16 else types.F32
            writer.add_tensor_info(gguf_name, values.shape, values.dtype, values.nbytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, arrays in converted(model, config):
        writer.write_tensor_data(mxfp4_blocks(*arrays) if len(arrays) > 1 else numpy.ascontiguousarray(arrays[0]))
    writer.close()
    partial_file.rename(target)


def add_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim_of(config))
    writer.add_value_length(head_dim_of(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_token_list([f"<{number}>" for number in range(config["vocab_size"])])  # tilerank counts them
    if config["model_type"] in ("gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window_pattern(config.get("sliding_window_pattern", 6))
    if config["model_type"] == "gpt_oss":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def rotation_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return how positions rotate queries and keys, in the dialect of transformers 5; of Gemma 3, in the layers that
    attend to all tokens."""
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    rope = rope.get("full_attention", rope)
    return {"rope_type": rope.get("type", "default"), **rope}


def add_rotation(writer: Any, config: dict[str, Any]) -> None:
    import gguf

    rope = rotation_of(config)
    writer.add_rope_dimension_count(head_dim_of(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if config["model_type"] == "gemma3_text":
        both = config.get("rope_parameters") or {"sliding_attention": {"rope_theta": config["rope_local_base_freq"]}}
        writer.add_rope_freq_base_swa(both["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def quantise(source: Path, quantization: str, target: Path) -> None:
    """Write a quantised GGUF: Q8_0 for int8, Q4_0 for int4, and for mxfp4 MXFP4 in experts and Q8_0 in other matrices.
    The output head has 8 bits, as tilerank has it. Does nothing if `target` exists."""
    if target.exists():
        return
    import ctypes

    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    kinds = {
        "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
        "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
        "mxfp4": llama_cpp.LLAMA_FTYPE_MOSTLY_MXFP4_MOE,
    }
    parameters.ftype = kinds[quantization]
    parameters.output_tensor_type = parameters.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
    partial_file = target.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(partial_file).encode(), ctypes.byref(parameters)) != 0:
        sys.exit("llama_model_quantize failed")
    partial_file.rename(target)


def rope_factors(rope: dict[str, Any], head_dim: int) -> Any:
    """Return the divisor of each rotary frequency by the "llama3" scaling rule, in fp32."""
    import numpy

    factors = []
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(0, head_dim, 2):
        turns = context / (2 * math.pi * rope["rope_theta"] ** (i / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return numpy.array(factors, dtype=numpy.float32)


class Context:
    """A llama.cpp context for `sequences` sequences of up to `tokens` tokens each."""

    def __init__(self, model: Any, vocab: int, sequences: int, tokens: int, threads: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_seq_max = sequences
        parameters.n_ctx = sequences * -(-tokens // 256) * 256
        parameters.n_batch = parameters.n_ubatch = PROMPT_ROWS
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.swa_full = False  # layers with a window keep no more than it, as in llama.cpp's server
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        self._batch = llama_cpp.llama_batch_init(PROMPT_ROWS, 0, 1)
        self._vocab = vocab

    def decode(self, rows: list[Row]) -> list[int]:
        """Run one step and return the next token after each row with needs_logits."""
        import numpy

        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (sequence, position, token, needs_logits) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, needs_logits
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if self._library.llama_decode(self._context, batch) != 0:
            sys.exit("llama_decode failed")
        next_tokens = []
        for row in (number for number, (_, _, _, needs_logits) in enumerate(rows) if needs_logits):
            logits = self._library.llama_get_logits_ith(self._context, row)
            next_tokens.append(int(numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax()))
        return next_tokens

    def cut(self, sequence: int, tokens: int) -> None:
        """Remove what is cached of a sequence after its first `tokens` tokens."""
        if not self._library.llama_memory_seq_rm(self._library.llama_get_memory(self._context), sequence, tokens, -1):
            sys.exit("llama_memory_seq_rm failed: what is cached of a wrong draft cannot be removed")

    def close(self) -> None:
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)


def answer(
    context: Context,
    prompts: list[list[int]],
    new_tokens: int,
    ends: list[int],
    lookup: Callable[[Any], Any] | None = None,
) -> list[Event]:
    """Generate up to `new_tokens` tokens of each prompt after its first one, and return when each came.

    lookup: returns tokens that may follow the given ones. A step checks them together.
    """
    import numpy

    texts = [list(prompt) for prompt in prompts]
    most = [len(prompt) + 1 + new_tokens for prompt in prompts]
    running = set(range(len(prompts)))
    events: list[Event] = []
    start = time.monotonic()

    def step(rows: list[Row]) -> None:
        chosen = iter(context.decode(rows))
        seconds = time.monotonic() - start
        for sequence, position, token, needs_logits in rows:
            if not needs_logits:
                continue
            next_token, text = next(chosen), texts[sequence]
            # A row counts if it is the last one of the text, which a right draft has become.
            if sequence in running and position == len(text) - 1 and token == text[position]:
                text.append(next_token)
                events.append((sequence, seconds))
                if next_token in ends or len(text) == most[sequence]:
                    running.remove(sequence)

    prompt_rows = [
        (sequence, position, token, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    for row in range(0, len(prompt_rows), PROMPT_ROWS):
        step(prompt_rows[row : row + PROMPT_ROWS])
    while running:
        rows: list[Row] = []
        for sequence in sorted(running):
            text = texts[sequence]
            drafts = [] if lookup is None else lookup(numpy.array(text, dtype=numpy.intc)).tolist()
            rows += [(sequence, len(text) - 1 + i, token, True) for i, token in enumerate([text[-1], *drafts])]
        step(rows)
        if lookup is not None:
            for sequence in running:
                context.cut(sequence, len(texts[sequence]) - 1)
    return events


def main(workload: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before threads start: they inherit it
    start = time.monotonic()
    file = Path(workload["model"])
    if file.suffix != ".gguf":
        config = json.loads((file / "config.json").read_text())
        if workload["quantization"] == "mxfp4" and config["model_type"] != "gpt_oss":
            found = config["model_type"]
            sys.exit(f"llama.cpp quantises only experts to MXFP4: expected model_type gpt_oss, found {found}")
        source, file = file, Path(workload["scratch"]) / "model.gguf"
        convert(source, config, file)
    if workload["quantization"] is not None:
        source, file = file, Path(workload["scratch"]) / f"model-{workload['quantization']}.gguf"
        quantise(source, workload["quantization"], file)
    converted_s = time.monotonic() - start
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    start = time.monotonic()
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
    load_s = time.monotonic() - start
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=DRAFTS) if workload["drafts"] else None

    def run(case: dict[str, Any], new_tokens: int) -> list[Event]:
        prompts = case["prompts"]
        longest = max(map(len, prompts)) + new_tokens + 1 + DRAFTS
        context = Context(model, vocab, len(prompts), longest, len(workload["cores"]))
        events = answer(context, prompts, new_tokens, case["end_token_ids"], lookup)
        context.close()
        return events

    for case in workload["cases"]:
        run(case, 2)  # warm-up: some systems prepare kernels for each shape
    ready_at = time.monotonic()
    events = [run(case, case["new_tokens"]) for case in workload["cases"]]
    return {"version": llama_cpp.__version__, "load_s": load_s, "ready_at": ready_at - converted_s, "events": events}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
