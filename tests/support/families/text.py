"""Records of the families that take text only, and of the language models of others.

Heads, widths and vocabularies of the tiny models do not divide.
"""

from .record import (
    ALL,
    AUTO,
    BIASES,
    FP32,
    PAD,
    PLAIN,
    SPLIT,
    Dims,
    Record,
    Start,
    delta_nets,
    experts,
    fp32_starts,
    tiny,
)

LLAMA_BIASES = BIASES | {"mlp_bias": True, "rope_scaling": None}
SOME_DENSE = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False}  # experts in layer 1 alone
SOME = ("llama-10-5-tied", "llama-6-3-biases", "qwen2-7-1", "qwen3-10-5", "moe-16-4", "llama-narrow", "moe-narrow")
NARROW = ("llama-narrow", "moe-narrow")
TEXT = Record(
    "text",
    "reference_text",
    {
        "llama-8-2": tiny("llama3", 0, (8, 2), hidden=128, vocab=2048, layers=3),
        "llama-10-5-tied": tiny(
            "llama3", 1, (10, 5), head_dim=24, hidden=160, inter=200, vocab=777, layers=3, tied=True
        ),
        "llama-6-3-biases": tiny(
            "llama3",
            2,
            (6, 3),
            head_dim=16,
            hidden=96,
            inter=240,
            vocab=500,
            layers=2,
            resaved=True,
            config=LLAMA_BIASES,
        ),
        "qwen2-7-1": tiny("qwen2", 3, (7, 1), hidden=112, inter=208, vocab=777, layers=3),
        "qwen2-12-4-untied": tiny("qwen2", 4, (12, 4), hidden=192, vocab=2048, layers=2, tied=False),
        "qwen3-10-5": tiny("qwen3", 5, (10, 5), head_dim=40, hidden=130, vocab=801, layers=3),
        "qwen3-12-4-untied": tiny("qwen3", 6, (12, 4), head_dim=24, hidden=128, vocab=2048, layers=2, tied=False),
        "moe-16-4": tiny("qwen3_moe", 8, (6, 3), head_dim=24, hidden=112, vocab=600, layers=2, **experts(16, 4, 208)),
        "moe-some-dense": tiny(
            "qwen3_moe",
            9,
            (8, 2),
            head_dim=16,
            hidden=96,
            inter=200,
            vocab=500,
            layers=4,
            resaved=True,
            **experts(7, 3, 200),
            config=SOME_DENSE,
        ),
        "qwen3-9-3-biases": tiny(
            "qwen3", 7, (9, 3), head_dim=32, hidden=136, inter=230, vocab=600, layers=2, resaved=True, config=BIASES
        ),
        # 2 and 3 units of 32 columns: of more ranks, the last have no part of the MLP.
        "llama-narrow": tiny("llama3", 10, (6, 2), head_dim=16, hidden=96, inter=48, vocab=400, layers=2),
        "moe-narrow": tiny("qwen3_moe", 11, (6, 2), head_dim=16, hidden=96, vocab=400, layers=2, **experts(8, 3, 80)),
    },
    new_tokens=32,
    # One token; one that crosses a page while decoding; three pages, scored in several chunks. With the new tokens 33,
    # 53 and 102 positions, past Llama's original_max_position_embeddings of 64.
    prompts=(1, 21, 70),
    seed=2,
    starts=(
        Start(1, SPLIT, ALL),  # one rank has all heads either way
        *(Start(tp, rungs=ALL) for tp in (2, 3)),
        *(Start(tp) for tp in (5, 6)),
        Start(2, SPLIT, ALL, threads=2),
        # In plain torch, where a step takes milliseconds and gloo carries the sums: uneven parts, ranks without a part.
        Start(3, SPLIT, PLAIN, models=SOME),
        Start(6, PAD, PLAIN, FP32, models=NARROW),
    ),
    dense={"mean": 1.1, "max": 1.5},
    averaged=("moe-narrow",),
)

QWEN35_DENSE: Dims = {"heads": (6, 3), "head_dim": 32, "hidden": 96, "inter": 200, "vocab": 600}
QWEN35_MOE: Dims = {"heads": (6, 2), "head_dim": 64, "hidden": 112, "vocab": 500}
QWEN35 = Record(
    "qwen3_5",
    "reference_text",
    # 1 to 4 value heads for each key head.
    {
        "one-value-head": tiny("qwen3_5", 1, **QWEN35_DENSE, layers=4, tied=False, **delta_nets(5, 5, 24, 40)),
        # The last of five layers is a delta net.
        "two-of-text-alone": tiny("qwen3_5", 2, **QWEN35_DENSE, layers=5, text_alone=True, all_bf16=True),
        "moe-three": tiny("qwen3_5_moe", 3, **QWEN35_MOE, layers=4, **delta_nets(6, 18), **experts(7, 3, 80)),
        "moe-four-tied": tiny(
            "qwen3_5_moe",
            4,
            **QWEN35_MOE,
            layers=5,
            tied=True,
            all_bf16=True,
            **delta_nets(3, 12),
            **experts(8, 2, 112),
        ),
    },
    new_tokens=48,
    prompts=(1, 63, 64, 65, 129),  # around the chunks of 64 tokens in which both compute the delta rule
    seed=5,
    starts=(
        Start(1, SPLIT),
        Start(2, rungs=ALL),
        Start(3),
        Start(5, SPLIT),
        Start(6, PAD),
        Start(2, SPLIT, threads=2),
        Start(2, SPLIT, PLAIN, models=("one-value-head",)),
        # A chunk goes on from the state that the one before left, also inside the 64 tokens of the kernel's chunk:
        # chunks end after 32, 96 and 128 tokens.
        Start(2, SPLIT, dtypes=FP32, models=("two-of-text-alone", "moe-three"), chunk_rows=(37, 97, 130)),
    ),
    averaged=("moe-three", "moe-four-tied"),
)

PUBLISHED = tiny("deepseek_v3", 1, (8, 8), hidden=128, inter=200, vocab=500, layers=3, moe_inter=80)
HALVES = {"rope_interleave": False, "attention_bias": True, "n_group": 1, "topk_group": 1}
NO_YARN = {"q_lora_rank": None, "rope_scaling": None, "n_shared_experts": 2, "norm_topk_prob": False}
FIVE_HEADS = ("plain-queries-no-yarn",)  # more ranks than heads
DEEPSEEK = Record(
    "deepseek_v3",
    "reference_text",
    {
        "as-published": PUBLISHED,
        "halves-biases-one-group": PUBLISHED | {"seed": 2, "hidden": 96, "heads": 7, "config": HALVES},
        "plain-queries-no-yarn": PUBLISHED | {"seed": 3, "layers": 2, "heads": 5, "config": NO_YARN},
    },
    new_tokens=24,
    # The longest is computed in the expanded form, beside the others in the absorbed one, and scored in both.
    prompts=(1, 21, 150),
    seed=7,
    starts=(
        Start(1, AUTO),
        Start(2, AUTO, ALL),
        Start(3, PAD),
        *(Start(tp, AUTO) for tp in (5, 6)),
        Start(2, AUTO, threads=2),
        Start(2, AUTO, PLAIN),
        # A chunk of 70 rows is in the expanded form, of three pieces where it ends with token 140.
        Start(2, AUTO, dtypes=FP32, models=("as-published",), chunk_rows=(1, 70), piece_tokens=32),
        # Every rank reads a part of a context for all heads, also a rank without heads. Steps mix one row of a sequence
        # with several of another, which are computed in different forms.
        *(Start(tp, AUTO, dtypes=FP32, models=("as-published",), chunk_rows=(37,), kv_split="on") for tp in (2, 3)),
        Start(6, AUTO, dtypes=FP32, models=FIVE_HEADS, chunk_rows=(37,), kv_split="on"),
    ),
    # The mean is no measure: with the large weights of chosen experts (2.5 together), a token that is sent to another
    # expert is up to forty times as wrong as the rest, and there are few of them.
    mixtures={"median": 1.1},
    averaged=("as-published", "halves-biases-one-group", "plain-queries-no-yarn"),
)

GPT_OSS = Record(
    "gpt_oss",
    "reference_text",
    # Experts of 7 and of 3 units of 32 columns; windows shorter and longer than a page, and than the chunks below.
    {
        "gpt-oss-8-2": tiny("gpt_oss", 1, (8, 2), vocab=777),
        "gpt-oss-6-3": tiny(
            "gpt_oss", 2, (6, 3), hidden=64, inter=96, vocab=500, layers=3, config={"sliding_window": 48}
        ),
    },
    new_tokens=24,
    prompts=(1, 21, 70),
    seed=9,
    starts=(
        Start(1, SPLIT, ALL),
        Start(2, AUTO),
        *(Start(tp, AUTO, dtypes=FP32, models=("gpt-oss-8-2",)) for tp in (3, 5)),
        Start(6, PAD, dtypes=FP32, models=("gpt-oss-8-2",)),
        Start(2, AUTO, PLAIN, FP32, models=("gpt-oss-6-3",)),
        Start(2, AUTO, dtypes=FP32, models=("gpt-oss-6-3",), chunk_rows=(7, 37)),
    ),
    averaged=("gpt-oss-8-2", "gpt-oss-6-3"),
)

SHORT = Record(
    "short",
    "reference_text",
    {
        "mistral": tiny("mistral", 1, (6, 3), head_dim=24, hidden=112, inter=200, vocab=777, layers=3),
        "ministral": tiny("mistral3", 2, (5, 1), head_dim=32, hidden=96, inter=240, vocab=777, layers=3),
        "qwen2-moe": tiny("qwen2_moe", 3, (6, 3), hidden=96, vocab=777, layers=3, **experts(7, 3, 80))
        | {"config": {"mlp_only_layers": [1]}},
        "phi3": tiny("phi3", 4, (6, 3), hidden=96, inter=240, vocab=777, layers=3),
        "olmo3": tiny("olmo3", 6, (6, 3), hidden=96, inter=200, vocab=777, layers=4),
        "smollm3": tiny("smollm3", 5, (7, 1), hidden=112, inter=200, vocab=777, layers=4),
        "minimax": tiny("minimax_m2", 6, (6, 3), head_dim=24, hidden=112, vocab=777, layers=2, **experts(7, 3, 80)),
        "mixtral": tiny("mixtral", 10, (6, 3), head_dim=24, hidden=112, vocab=777, layers=2, **experts(7, 3, 80)),
        "glm": tiny("glm4_moe", 7, (6, 3), head_dim=24, hidden=96, inter=200, vocab=777, layers=3, **experts(7, 3, 80))
        | {"config": {"draft_vocab_size": 83}},
        "glm-flash": tiny("glm4_moe_lite", 8, (5, 5), hidden=96, inter=200, vocab=777, layers=2, **experts(7, 3, 80)),
        "next": tiny("qwen3_next", 9, (6, 3), head_dim=32, hidden=96, vocab=777, layers=4, **experts(7, 3, 80))
        | delta_nets(3, 6, 24, 40),
    },
    new_tokens=24,
    # Around the windows of 20 and 31 tokens, with and without the new tokens; the longest leaves a snapshot of states.
    prompts=(1, 19, 80),
    seed=3,
    starts=(
        Start(1, SPLIT),
        *fp32_starts(
            (2, 3, 5, 6),
            AUTO,
            plain=("mistral", "ministral", "qwen2-moe", "phi3", "smollm3", "minimax"),
            chunked=("mistral", "ministral"),
        ),
    ),
    averaged=("qwen2-moe", "minimax", "mixtral", "glm", "glm-flash", "next"),
)

LISTED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA3 = Record(
    "gemma3",
    "reference_text",
    {
        # Four query heads, which do not suffice for five ranks; a linear scaling of the full layers.
        "as-1b": tiny("gemma3_text", 1, (4, 1), head_dim=24, hidden=112, inter=200, vocab=777, layers=3),
        # Layers as listed, in the file of transformers 5; other KV heads, a window of nearly two pages.
        "listed": tiny(
            "gemma3_text",
            2,
            (6, 3),
            head_dim=16,
            hidden=96,
            inter=240,
            vocab=600,
            layers=3,
            resaved=True,
            config={
                "layer_types": LISTED,
                "sliding_window_pattern": 2,
                "sliding_window": 31,
                "rope_scaling": None,
                "query_pre_attn_scalar": 16,
            },
        ),
    },
    new_tokens=24,
    # Around the windows of 20 and 31 tokens, with and without the new tokens; several times as long.
    prompts=(1, 19, 21, 43, 70),
    seed=3,
    starts=(Start(1, SPLIT), *fp32_starts((2, 3, 5, 6), SPLIT, plain=("as-1b",), chunked=("as-1b",))),
)

GEMMA4 = Record(
    "gemma4",
    "reference_text",
    {
        # The last layer attends to all tokens, with heads of twice the size and one KV head, whose keys are its values.
        "as-31b": tiny("gemma4_text", 1, (6, 3), head_dim=16, hidden=112, inter=200, vocab=777, layers=3),
        "as-26b": tiny(
            "gemma4_text",
            2,
            (4, 2),
            head_dim=24,
            hidden=96,
            inter=104,
            vocab=600,
            layers=3,
            resaved=True,
            **experts(7, 3, 72),
        ),
        # The last three layers read keys of layers 1 and 2; their MLPs are twice as wide.
        "as-e2b": tiny("gemma4_text", 3, (4, 1), head_dim=24, hidden=96, inter=104, vocab=600, layers=6, per_layer=64),
    },
    new_tokens=12,
    # Around the window of 20 tokens, with and without the new tokens; several times as long.
    prompts=(1, 19, 21, 70),
    seed=3,
    starts=(Start(1, SPLIT), *fp32_starts((3, 5, 6), SPLIT, plain=("as-26b", "as-e2b"), chunked=("as-e2b",))),
)
