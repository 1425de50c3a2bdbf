"""llama.cpp's mtmd as a peer of benchmarks/compare_media.py: `python run_llama_cpp_media.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has llama-cpp-python, and gguf to convert the model. WORKLOAD and
RESULT are those of run_transformers_media.py; `preprocessing` includes the tokens of the text. The converted model lies
beside WORKLOAD.
"""

import base64
import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"  # of the chat template; mtmd writes it around its own marker
MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
DEEPSTACK = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
VISION = "model.visual."


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


def add_tensor(writer: Any, name: str, values: Any, *, wide: bool = False) -> None:
    """Add a tensor to a GGUF: a matrix in bf16 as it is, anything else, or anything if `wide`, in fp32."""
    import gguf
    import numpy

    if values.dtype != numpy.uint16:
        writer.add_tensor(name, values)
    elif wide or values.ndim == 1:
        writer.add_tensor(name, (values.astype(numpy.uint32) << 16).view(numpy.float32))
    else:
        raw = numpy.ascontiguousarray(values).view(numpy.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert_text(model: Path, config: dict[str, Any], target: Path, *, wide: bool) -> None:
    """Write the language model and its vocabulary as GGUF."""
    import gguf

    text = config["text_config"]
    rope = text.get("rope_parameters") or {**text["rope_scaling"], "rope_theta": text["rope_theta"]}
    arch = gguf.MODEL_ARCH.QWEN3VL
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_rope_dimension_count(text["head_dim"])
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    size = text["vocab_size"]
    words, kinds = [f"[PAD{number}]" for number in range(size)], [gguf.TokenType.UNUSED] * size
    for word, number in tokenizer["model"]["vocab"].items():
        words[number], kinds[number] = word, gguf.TokenType.NORMAL
    for token in tokenizer["added_tokens"]:
        words[token["id"]], kinds[token["id"]] = token["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(model, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)
    names = gguf.get_tensor_name_map(arch, text["num_hidden_layers"])
    for name, values in tensors(model):
        if not name.startswith(VISION):
            found = names.get_name(name.replace("language_model.", ""), try_suffixes=(".weight", ".bias"))
            if found is None:
                sys.exit(f"llama.cpp has no name for {name}")
            add_tensor(writer, found, values, wide=wide)
    write(writer)


def convert_vision(model: Path, config: dict[str, Any], target: Path, *, wide: bool) -> None:
    """Write the vision tower as GGUF, its position table and the convolution of patches in fp32."""
    import gguf

    vision, settings = config["vision_config"], json.loads((model / "preprocessor_config.json").read_text())
    taps = vision["deepstack_visual_indexes"]
    writer = gguf.GGUFWriter(target, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN3VL)
    writer.add_vision_use_gelu(True)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(round(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_is_deepstack_layers([block in taps for block in range(vision["depth"])])
    writer.add_vision_image_mean(settings["image_mean"])
    writer.add_vision_image_std(settings["image_std"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["depth"])
    for full, values in tensors(model):
        if not full.startswith(VISION):
            continue
        name = full.removeprefix(VISION)
        match name.split("."):
            case ["patch_embed", "proj", "weight"]:  # a convolution for each of the two frames of a patch
                for suffix, frame in (("", 0), (".1", 1)):
                    add_tensor(writer, f"v.patch_embd.weight{suffix}", values[:, :, frame], wide=True)
            case ["merger", part, kind]:
                add_tensor(writer, f"{MERGER[part]}.{kind}", values, wide=wide)
            case ["deepstack_merger_list", level, part, kind]:
                add_tensor(writer, f"v.deepstack.{taps[int(level)]}.{DEEPSTACK[part]}.{kind}", values, wide=wide)
            case _:
                found = names.get_name(f"visual.{name}", try_suffixes=(".weight", ".bias"))
                if found is None:
                    sys.exit(f"llama.cpp has no name for {full}")
                add_tensor(writer, found, values, wide=wide or name.startswith("pos_embed"))
    write(writer)


class Pipeline:
    """The language model and the tower, with room for prompts of `tokens` tokens."""

    def __init__(self, text: Path, vision: Path, limits: tuple[int, int], tokens: int, threads: int) -> None:
        """limits: of the tokens of a picture."""
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self._llama, self._mtmd = llama_cpp, mtmd_cpp
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(text).encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = -(-tokens // 256) * 256
        settings.n_batch = settings.n_ubatch = self._batch = min(settings.n_ctx, 2048)
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        tower = mtmd_cpp.mtmd_context_params_default()
        tower.use_gpu, tower.print_timings, tower.n_threads = False, False, threads
        tower.image_min_tokens, tower.image_max_tokens = limits
        self._tower = mtmd_cpp.mtmd_init_from_file(str(vision).encode(), self._model, tower)
        if not (self._model and self._context and self._tower):
            sys.exit("llama.cpp cannot load the converted model")

    def run(self, file: bytes, text: bytes) -> dict[str, float]:
        """Return the seconds of each part for a picture and a text with a marker in its place."""
        mtmd, llama = self._mtmd, self._llama
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        began = time.perf_counter()
        picture = mtmd.mtmd_helper_bitmap_init_from_buf(
            self._tower, (ctypes.c_uint8 * len(file)).from_buffer_copy(file), len(file), False
        )
        decoded = time.perf_counter()
        chunks = mtmd.mtmd_input_chunks_init()
        prompt = mtmd.mtmd_input_text(text=text, text_len=len(text), add_special=False, parse_special=True)
        pictures = (mtmd.mtmd_bitmap_p_ctypes * 1)(picture)
        self._check("mtmd_tokenize", mtmd.mtmd_tokenize(self._tower, chunks, ctypes.byref(prompt), pictures, 1))
        processed = time.perf_counter()
        number, position = mtmd.mtmd_input_chunks_size(chunks), llama.llama_pos(0)
        tower_s = 0.0
        for chunk in (mtmd.mtmd_input_chunks_get(chunks, index) for index in range(number)):
            place = (position, 0, self._batch)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                start = time.perf_counter()
                self._check("mtmd_encode_chunk", mtmd.mtmd_encode_chunk(self._tower, chunk))
                tower_s += time.perf_counter() - start
                found = mtmd.mtmd_get_output_embd(self._tower)
                callback = mtmd.mtmd_helper_post_decode_callback()
                done = mtmd.mtmd_helper_decode_image_chunk(
                    self._tower, self._context, chunk, found, *place, ctypes.byref(position), callback, None
                )
            else:
                done = mtmd.mtmd_helper_eval_chunk_single(
                    self._tower, self._context, chunk, *place, True, ctypes.byref(position)
                )
            self._check("llama_decode", done)
        llama.llama_get_logits_ith(self._context, -1)  # waits for them
        ended = time.perf_counter()
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(picture)
        return {
            "decode": decoded - began,
            "preprocessing": processed - decoded,
            "tower": tower_s,
            "first token": ended - began,
        }

    def _check(self, call: str, status: int) -> None:
        if status != 0:
            sys.exit(f"{call} failed with status {status}")


def main(workload: dict[str, Any], scratch: Path) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before threads start: they inherit it
    model = Path(workload["model"])
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen3_vl":
        sys.exit(f"converting for llama.cpp: expected model_type qwen3_vl, found {config['model_type']}")
    wide = workload["dtype"] == "float32"
    text, vision = scratch / "text.gguf", scratch / "vision.gguf"
    convert_text(model, config, text, wide=wide)
    convert_vision(model, config, vision, wide=wide)
    import llama_cpp
    from llama_cpp import mtmd_cpp

    settings = json.loads((model / "preprocessor_config.json").read_text())
    pixels = (settings["patch_size"] * settings["merge_size"]) ** 2
    limits = (settings["size"]["shortest_edge"] // pixels, settings["size"]["longest_edge"] // pixels)
    prompt = workload["texts"]["image"].replace(IMAGE, mtmd_cpp.mtmd_default_marker().decode()).encode()
    pipeline = Pipeline(text, vision, limits, limits[1] + 1024, len(workload["cores"]))
    sizes = [[pipeline.run(base64.b64decode(file), prompt) for file in files] for _, files in workload["sizes"]]
    return {"version": llama_cpp.__version__, "sizes": sizes}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result = main(json.loads(workload_file.read_text()), workload_file.parent)
    result_file.write_text(json.dumps(result))
