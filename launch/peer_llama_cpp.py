"""llama.cpp as a peer of `tilerank bench compare`: `python peer_llama_cpp.py JOB RESULT`.

Stands alone, so that any Python which has the peer (llama-cpp-python, and gguf to convert the model) can run it. What
JOB and RESULT hold is said in bench_compare.py. A step is one llama_decode and the argmax of its logits.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}  # by model_type, as gguf calls them
PROMPT_ROWS = 2048  # of a llama_decode


def tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """Name and memory-mapped values, bf16 as uint16, of a safetensors checkpoint."""
    import numpy

    kinds = {"BF16": numpy.uint16, "F32": numpy.float32}
    for file in sorted(model.glob("*.safetensors")):
        data = numpy.memmap(file, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        for name, about in json.loads(data[8 : 8 + size].tobytes()).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in about["data_offsets"])
                yield name, data[begin:end].view(kinds[about["dtype"]]).reshape(about["shape"])


def convert(model: Path, target: Path) -> None:
    """Writes the model as GGUF, weights as they are, norms in fp32, no tokenizer, unless an earlier run did."""
    if target.exists():
        return
    import gguf
    import numpy

    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        sys.exit(f"this converts {', '.join(ARCHITECTURES)} for llama.cpp, not {kind}")
    arch = gguf.MODEL_ARCH[ARCHITECTURES[kind]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    made = target.with_suffix(".part")
    writer = gguf.GGUFWriter(made, gguf.MODEL_ARCH_NAMES[arch])
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
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            # Pairs that are rotated together stand next to each other there.
            pairs = values.reshape(heads if "q_proj" in name else kv_heads, 2, head_dim // 2, -1)
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            sys.exit(f"llama.cpp has no name for {name}")
        if values.dtype == numpy.uint16 and values.ndim == 1:
            writer.add_tensor(theirs, (values.astype(numpy.uint32) << 16).view(numpy.float32))
        elif values.dtype == numpy.uint16:
            whole = numpy.ascontiguousarray(values).view(numpy.uint8)
            writer.add_tensor(theirs, whole, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made.rename(target)


def quantise(source: Path, codes: str, target: Path) -> None:
    """Writes a GGUF of codes, 8 bits of the head as ours, unless an earlier run did."""
    if target.exists():
        return
    import ctypes

    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    q8_0 = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    parameters.ftype = q8_0 if codes == "int8" else llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    parameters.output_tensor_type = parameters.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
    made = target.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(made).encode(), ctypes.byref(parameters)) != 0:
        sys.exit("llama_model_quantize failed")
    made.rename(target)


def rope_factors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """What llama3's rule divides each frequency by."""
    factors = []
    context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(0, head_dim, 2):
        turns = context / (2 * math.pi * rope["rope_theta"] ** (i / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


class Context:
    """A context of llama.cpp for `sequences` sequences of up to `tokens` tokens."""

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
        """(sequence, position, token, whether the next one is wanted) each; the next tokens of sequences."""
        import numpy

        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (sequence, position, token, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if self._library.llama_decode(self._context, batch) != 0:
            sys.exit("llama_decode failed")
        chosen = {}
        for row, (sequence, _, _, wanted) in enumerate(rows):
            if wanted:
                logits = self._library.llama_get_logits_ith(self._context, row)
                chosen[sequence] = int(numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())
        return chosen

    def close(self) -> None:
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)


def main(job: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, job["cores"])  # before threads start, which inherit it
    began = time.monotonic()
    file = Path(job["scratch"]) / "model.gguf"
    convert(Path(job["model"]), file)
    if job["quantization"] is not None:
        source, file = file, Path(job["scratch"]) / f"model-{job['quantization']}.gguf"
        quantise(source, job["quantization"], file)
    converted_s = time.monotonic() - began
    import llama_cpp

    vocab = json.loads((Path(job["model"]) / "config.json").read_text())["vocab_size"]
    began = time.monotonic()
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
    load_s = time.monotonic() - began

    def run(prompts: list[list[int]], new_tokens: int) -> list[tuple[int, float]]:
        longest = max(map(len, prompts)) + new_tokens + 1
        context = Context(model, vocab, len(prompts), longest, len(job["cores"]))
        rows = [
            (sequence, position, token, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        events: list[tuple[int, float]] = []
        chosen: dict[int, int] = {}
        began = time.monotonic()
        for start in range(0, len(rows), PROMPT_ROWS):
            first = context.decode(rows[start : start + PROMPT_ROWS])
            events += [(sequence, time.monotonic() - began) for sequence in first]
            chosen |= first
        for step in range(new_tokens):
            chosen = context.decode([(s, len(prompts[s]) + step, token, True) for s, token in chosen.items()])
            seconds = time.monotonic() - began
            events += [(sequence, seconds) for sequence in chosen]
        context.close()
        return events

    for case in job["cases"]:
        run(case["prompts"], 2)  # of the same shapes, for which some prepare kernels
    ready_at = time.monotonic()
    events = [run(case["prompts"], case["new_tokens"]) for case in job["cases"]]
    return {"version": llama_cpp.__version__, "load_s": load_s, "ready_at": ready_at - converted_s, "events": events}


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(job_file.read_text()))))
