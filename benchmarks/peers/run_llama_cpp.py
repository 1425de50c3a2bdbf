"""llama.cpp as a peer of benchmarks/compare.py: `python run_llama_cpp.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has llama-cpp-python, and gguf to convert the model. The docstring of
PEERS in benchmarks/compare.py describes WORKLOAD and RESULT. A step is one llama_decode and the argmax of its logits.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}  # gguf's names by model_type
PROMPT_ROWS = 2048  # tokens in one llama_decode of a prefill


def tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Yield name and memory-mapped values (bf16 as uint16) of each tensor of a safetensors checkpoint."""
    import numpy

    dtypes = {"BF16": numpy.uint16, "F32": numpy.float32}
    for file in sorted(model.glob("*.safetensors")):
        data = numpy.memmap(file, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        for name, info in json.loads(data[8 : 8 + size].tobytes()).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in info["data_offsets"])
                yield name, data[begin:end].view(dtypes[info["dtype"]]).reshape(info["shape"])


def convert(model: Path, target: Path) -> None:
    """Write the model as GGUF: weights unchanged, norms in fp32, no tokenizer. Does nothing if `target` exists."""
    if target.exists():
        return
    import gguf
    import numpy

    config = json.loads((model / "config.json").read_text())
    model_type = config["model_type"]
    if model_type not in ARCHITECTURES:
        sys.exit(f"converting for llama.cpp: expected model_type in {', '.join(ARCHITECTURES)}, found {model_type}")
    arch = gguf.MODEL_ARCH[ARCHITECTURES[model_type]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    partial_file = target.with_suffix(".part")
    writer = gguf.GGUFWriter(partial_file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if rope.get("rope_type", rope.get("type")) == "llama3":
        writer.add_tensor("rope_freqs.weight", numpy.array(rope_factors(rope, head_dim), dtype=numpy.float32))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, values in tensors(model):
        if model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp stores the two rows of a rotated pair next to each other.
            pairs = values.reshape(heads if "q_proj" in name else kv_heads, 2, head_dim // 2, -1)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            sys.exit(f"llama.cpp has no name for {name}")
        if values.dtype == numpy.uint16 and values.ndim == 1:
            writer.add_tensor(gguf_name, (values.astype(numpy.uint32) << 16).view(numpy.float32))
        elif values.dtype == numpy.uint16:
            raw = numpy.ascontiguousarray(values).view(numpy.uint8)
            writer.add_tensor(gguf_name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial_file.rename(target)


def quantise(source: Path, quantization: str, target: Path) -> None:
    """Write a quantised GGUF: Q8_0 for int8, Q4_0 for int4, the output head in 8 bits as tilerank has it.

    Does nothing if `target` exists.
    """
    if target.exists():
        return
    import ctypes

    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    q8_0 = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    parameters.ftype = q8_0 if quantization == "int8" else llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    parameters.output_tensor_type = parameters.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
    partial_file = target.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(partial_file).encode(), ctypes.byref(parameters)) != 0:
        sys.exit("llama_model_quantize failed")
    partial_file.rename(target)


def rope_factors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """Return the divisor of each rotary frequency by the "llama3" scaling rule."""
    factors = []
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(0, head_dim, 2):
        turns = context / (2 * math.pi * rope["rope_theta"] ** (i / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


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
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        self._batch = llama_cpp.llama_batch_init(PROMPT_ROWS, 0, 1)
        self._vocab = vocab

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run one step and return the next token of each sequence that has a row with needs_logits.

        rows: (sequence, position, token, needs_logits) each.
        """
        import numpy

        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (sequence, position, token, needs_logits) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, needs_logits
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if self._library.llama_decode(self._context, batch) != 0:
            sys.exit("llama_decode failed")
        next_tokens = {}
        for row, (sequence, _, _, needs_logits) in enumerate(rows):
            if needs_logits:
                logits = self._library.llama_get_logits_ith(self._context, row)
                next_tokens[sequence] = int(numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())
        return next_tokens

    def close(self) -> None:
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)


def main(workload: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before threads start: they inherit it
    start = time.monotonic()
    file = Path(workload["model"])
    if file.suffix != ".gguf":
        file = Path(workload["scratch"]) / "model.gguf"
        convert(Path(workload["model"]), file)
    if workload["quantization"] is not None:
        source, file = file, Path(workload["scratch"]) / f"model-{workload['quantization']}.gguf"
        quantise(source, workload["quantization"], file)
    converted_s = time.monotonic() - start
    import llama_cpp

    start = time.monotonic()
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
    load_s = time.monotonic() - start
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def run(prompts: list[list[int]], new_tokens: int) -> list[tuple[int, float]]:
        longest = max(map(len, prompts)) + new_tokens + 1
        context = Context(model, vocab, len(prompts), longest, len(workload["cores"]))
        rows = [
            (sequence, position, token, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        events: list[tuple[int, float]] = []
        next_tokens: dict[int, int] = {}
        start = time.monotonic()
        for row in range(0, len(rows), PROMPT_ROWS):
            first_tokens = context.decode(rows[row : row + PROMPT_ROWS])
            events += [(sequence, time.monotonic() - start) for sequence in first_tokens]
            next_tokens |= first_tokens
        for step in range(new_tokens):
            next_tokens = context.decode([(s, len(prompts[s]) + step, token, True) for s, token in next_tokens.items()])
            seconds = time.monotonic() - start
            events += [(sequence, seconds) for sequence in next_tokens]
        context.close()
        return events

    for case in workload["cases"]:
        run(case["prompts"], 2)  # warm-up: some systems prepare kernels for each shape
    ready_at = time.monotonic()
    events = [run(case["prompts"], case["new_tokens"]) for case in workload["cases"]]
    return {"version": llama_cpp.__version__, "load_s": load_s, "ready_at": ready_at - converted_s, "events": events}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
