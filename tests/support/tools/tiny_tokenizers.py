"""The tokenizers and chat templates of tiny checkpoints, in the layout of the public models (make_tiny.py calls it)."""
import functools, json, os, pathlib

from transformers import PreTrainedTokenizerFast

QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
                "<|box_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_NONSPECIAL = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
OMNI_EXTRA = ["<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"]
PIXTRAL_EXTRA = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
MOSS_EXTRA = ["<|image|>", "<|video|>", "<|time_start|>", "<|time_end|>", "<|silence|>"]
LLAMA_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>",
                 "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
DS_SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"]
QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

QWEN_CHAT = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' }}"
    "{%- if m['content'] is string %}{{- m['content'] }}{%- else %}{%- for c in m['content'] %}"
    "{%- if c['type'] == 'image' or 'image' in c %}{{- IMG }}"
    "{%- elif c['type'] == 'video' or 'video' in c %}{{- VID }}"
    "{%- elif c['type'] == 'audio' or 'audio' in c %}{{- AUD }}"
    "{%- elif 'text' in c %}{{- c['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")
def qwen_chat(img="<|vision_start|><|image_pad|><|vision_end|>", vid="<|vision_start|><|video_pad|><|vision_end|>",
              aud="<|audio_start|><|audio_pad|><|audio_end|>"):
    return QWEN_CHAT.replace("IMG", repr(img)).replace("VID", repr(vid)).replace("AUD", repr(aud))
LLAMA_CHAT = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{%- if m['content'] is string %}{{- m['content'] | trim }}{%- else %}{%- for c in m['content'] %}"
    "{%- if c['type'] == 'image' %}{{- '<|image|>' }}{%- elif c['type'] == 'text' %}{{- c['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}")
DS_CHAT = (
    "{{- bos_token }}{%- for m in messages %}{%- if m['role'] == 'system' %}{{- m['content'] }}"
    "{%- elif m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}"
    "{%- else %}{{- '<｜Assistant｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}")

GEMMA_CHAT = (
    "{{- bos_token }}{%- set first = '' %}{%- set turns = messages %}"
    "{%- if messages[0]['role'] == 'system' %}{%- set turns = messages[1:] %}{%- set system = messages[0]['content'] %}"
    "{%- set first = (system if system is string else system[0]['text']) + '\\n\\n' %}{%- endif %}"
    "{%- for m in turns %}{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + (first if loop.first else '') }}"
    "{%- if m['content'] is string %}{{- m['content'] | trim }}{%- else %}{%- for c in m['content'] %}"
    "{%- if c['type'] == 'image' %}{{- '<start_of_image>' }}{%- elif c['type'] == 'text' %}{{- c['text'] | trim }}{%- endif %}{%- endfor %}"
    "{%- endif %}{{- '<end_of_turn>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}")
GEMMA4_CHAT = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}"
    "{%- if m['content'] is string %}{{- m['content'] | trim }}{%- else %}{%- for c in m['content'] %}"
    "{%- if c['type'] == 'image' %}{{- '<|image|>' }}{%- elif c['type'] == 'text' %}{{- c['text'] | trim }}{%- endif %}{%- endfor %}"
    "{%- endif %}{{- '<turn|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{%- endif %}")
GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"]
GEMMA4_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|image>", "<|image|>", "<image|>", "<|think|>", "<|channel>", "<channel|>",
                  "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
GEMMA_NEWLINES = ["\n" * n for n in range(1, 5)]
GEMMA_SPARE = 64                        # rows of the embedding after the tokens of text, the first of which is that of pictures

_TEXT = None
def corpus():
    """Free text found on any machine with Python: the standard library's own sources and licence."""
    global _TEXT
    if _TEXT is None:
        root = pathlib.Path(os.__file__).parent
        files = sorted(root.glob("*.py")) + sorted(pathlib.Path("/usr/share/common-licenses").glob("*"))
        out, n = [], 0
        for f in files:
            try: t = f.read_text()
            except Exception: continue
            out.append(t[:40000]); n += len(out[-1])
            if n > 1_500_000: break
        _TEXT = out
    return _TEXT

@functools.cache
def train_bpe(nvocab, split):
    """Returns the JSON of a tokenizer, which takes longer to train than most models to make."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=nvocab, show_progress=False,
                                                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t.to_str()

@functools.cache
def train_gemma(nvocab, special):
    """Returns the JSON of a BPE tokenizer of characters with bytes for those that it lacks, as SentencePiece makes them."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    first = [*special, *GEMMA_NEWLINES] + [f"<0x{byte:02X}>" for byte in range(256)]
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer = normalizers.Replace(" ", "\u2581")
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    t.train_from_iterator(corpus()[:20], trainers.BpeTrainer(vocab_size=nvocab, show_progress=False, limit_alphabet=80,
                                                             max_token_length=12, special_tokens=first))
    return t.to_str()

def make_gemma_tokenizer(vocab, out, style):
    """Writes tokenizer files whose ids lie below `vocab`. gemma_pictures: the last GEMMA_SPARE ids begin with that of pictures."""
    from tokenizers import AddedToken, Tokenizer, processors
    pictures, special = style == "gemma_pictures", GEMMA4_SPECIAL if style == "gemma4" else GEMMA_SPECIAL
    known = vocab - GEMMA_SPARE if pictures else vocab
    described = json.loads(train_gemma(known, tuple(special)))
    described["added_tokens"] = []
    t = Tokenizer.from_str(json.dumps(described))
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    t.add_tokens([AddedToken(s, special=False, normalized=False) for s in GEMMA_NEWLINES])
    if pictures:
        t.add_special_tokens([AddedToken("<image_soft_token>", special=True, normalized=False)])
        assert t.token_to_id("<image_soft_token>") == known
    b = t.token_to_id("<bos>")
    t.post_processor = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", b)])
    names = {"gemma_pictures": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"), "gemma4": ("<|image|>", "<|image>", "<image|>")}
    more = {"extra_special_tokens": dict(zip(("image_token", "boi_token", "eoi_token"), names[style]))} if style in names else {}
    tk = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
                                 clean_up_tokenization_spaces=False, model_max_length=4096, padding_side="left", **more)
    tk.chat_template = GEMMA4_CHAT if style == "gemma4" else GEMMA_CHAT
    tk.save_pretrained(out)
    return t

def make_tokenizer(style, vocab, out):
    """Writes tokenizer files whose ids all lie below `vocab` (mllama: the image token is exactly `vocab`)."""
    if style.startswith("gemma"): return make_gemma_tokenizer(vocab, out, style)
    from tokenizers import AddedToken, Tokenizer, processors
    special = {"qwen": QWEN_SPECIAL, "omni": QWEN_SPECIAL, "moss": QWEN_SPECIAL, "pixtral": QWEN_SPECIAL, "llama": LLAMA_SPECIAL, "mllama": LLAMA_SPECIAL,
               "deepseek": DS_SPECIAL}[style]
    of_qwen = style in ("qwen", "omni", "moss", "pixtral")
    plain = QWEN_NONSPECIAL if of_qwen else []
    extra = {"omni": OMNI_EXTRA, "moss": MOSS_EXTRA, "pixtral": PIXTRAL_EXTRA}.get(style, [])
    reserve = 12                        # like the public models: the embedding is a little larger than the tokenizer
    nbpe = vocab - len(special) - len(plain) - len(extra) - (0 if style == "mllama" else reserve)
    t = Tokenizer.from_str(train_bpe(nbpe, LLAMA_SPLIT if "llama" in style or style == "deepseek" else QWEN_SPLIT))
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    t.add_tokens([AddedToken(s, special=False, normalized=False) for s in plain])
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in extra])
    if style == "mllama":
        fill = vocab - t.get_vocab_size()
        t.add_special_tokens([f"<|reserved_special_token_{i}|>" for i in range(fill)])
        t.add_special_tokens(["<|image|>"])
        assert t.token_to_id("<|image|>") == vocab
    bos = {"llama": "<|begin_of_text|>", "mllama": "<|begin_of_text|>", "deepseek": DS_SPECIAL[0]}.get(style)
    if bos:
        b = t.token_to_id(bos)
        t.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, b)])])
    else:
        t.post_processor = processors.ByteLevel(trim_offsets=False)
    kw = dict(clean_up_tokenization_spaces=False, model_max_length=4096)
    if of_qwen:
        kw.update(eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left")
        cls = "Qwen2Tokenizer"
    elif style == "deepseek":
        kw.update(bos_token=DS_SPECIAL[0], eos_token=DS_SPECIAL[1], pad_token=DS_SPECIAL[2], padding_side="left")
        cls = "LlamaTokenizerFast"
    else:
        kw.update(bos_token=bos, eos_token="<|eot_id|>", pad_token="<|finetune_right_pad_id|>", padding_side="left")
        cls = "PreTrainedTokenizerFast"
    if style == "omni":                 # attributes that the Omni processor reads from the tokenizer
        kw["extra_special_tokens"] = {"image_token": "<|image_pad|>", "audio_token": "<|audio_pad|>", "video_token": "<|video_pad|>",
                                      "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
                                      "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    tk = PreTrainedTokenizerFast(tokenizer_object=t, **kw)
    tk.chat_template = {"deepseek": DS_CHAT, "llama": LLAMA_CHAT, "mllama": LLAMA_CHAT,
                        "moss": qwen_chat(img="<|image|>", vid="<|video|>"), "pixtral": qwen_chat(img="[IMG]")}.get(style) or qwen_chat()
    tk.save_pretrained(out)
    # public directories: tokenizer_config.json names the slow-era class; vocab.json / merges.txt sit beside for Qwen
    p = os.path.join(out, "tokenizer_config.json"); tc = json.load(open(p))
    tc["tokenizer_class"] = cls
    tc.pop("tokenizer_file", None)
    tc["added_tokens_decoder"] = {str(i): {"content": a.content, "lstrip": a.lstrip, "normalized": a.normalized, "rstrip": a.rstrip,
                                           "single_word": a.single_word, "special": a.special}
                                  for i, a in sorted(t.get_added_tokens_decoder().items())}
    tc["chat_template"] = tk.chat_template
    json.dump(tc, open(p, "w"), indent=2, ensure_ascii=False)
    for f in ("chat_template.jinja",):
        if os.path.exists(os.path.join(out, f)): os.remove(os.path.join(out, f))
    if style != "deepseek":
        json.dump({"chat_template": tk.chat_template}, open(os.path.join(out, "chat_template.json"), "w"), indent=2, ensure_ascii=False)
    if cls == "Qwen2Tokenizer":
        m = json.loads(t.to_str())["model"]
        json.dump(m["vocab"], open(os.path.join(out, "vocab.json"), "w"), ensure_ascii=False)
        with open(os.path.join(out, "merges.txt"), "w") as f:
            f.write("#version: 0.2\n")
            for x in m["merges"]: f.write((x if isinstance(x, str) else " ".join(x)) + "\n")
    return t
