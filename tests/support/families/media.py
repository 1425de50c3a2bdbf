"""Records of the families that take pictures, videos and sounds.

The towers of make_tiny.py have 4 heads and 136 columns: of 6 ranks, the last have none.
"""

from typing import Any

from .record import ALL, AUTO, BIASES, FP32, PAD, PLAIN, SPLIT, Dims, Record, Start, delta_nets, experts, tiny

WITH_MEDIA = (Start(1, SPLIT), *(Start(tp) for tp in (2, 3, 6)), Start(2, PAD, PLAIN, FP32))
NOT_NORMALISED = {"norm_topk_prob": False}
VISION = Record(
    "vision",
    "reference_vl",
    {
        "vl-6-3": tiny("qwen3_vl", 5, (6, 3), head_dim=24, hidden=112, inter=200, vocab=777, layers=4),
        "vl-moe-10-5": tiny(
            "qwen3_vl_moe",
            4,
            (10, 5),
            head_dim=16,
            hidden=96,
            vocab=600,
            layers=4,
            **experts(7, 3, 80),
            config=NOT_NORMALISED,
        ),
        # Without DeepStack.
        "3.5-6-3": tiny(
            "qwen3_5", 27, (6, 3), head_dim=32, hidden=112, inter=200, vocab=777, layers=4, **delta_nets(3, 9, 24)
        ),
        "3.5-moe-8-4": tiny("qwen3_5_moe", 7, (8, 4), head_dim=32, hidden=96, vocab=600, layers=4, **experts(7, 3, 80)),
    },
    new_tokens=8,
    starts=WITH_MEDIA,
    mixtures={"mean": 1.3},
)
MLLAMA_63 = tiny("mllama", 3, (6, 3), hidden=144, inter=200, vocab=777, layers=6)
MLLAMA = Record(
    "mllama",
    "reference_mllama",
    {
        "mllama-6-3": MLLAMA_63,
        # Outputs of the intermediate layers instead of their inputs; one of the layers is the last.
        "as-transformers": MLLAMA_63 | {"options": {"--mllama-intermediate": "transformers"}},
    },
    new_tokens=8,
    starts=(
        Start(1, SPLIT, dtypes=FP32),
        *(Start(tp, models=("mllama-6-3",)) for tp in (2, 3, 6)),
        Start(2, PAD, PLAIN, FP32, models=("mllama-6-3",)),
    ),
)
MOSS = Record(
    "moss_vl",
    "reference_moss",
    {
        "moss-6-3": tiny("moss_vl", 3, (6, 3), head_dim=24, hidden=144, inter=200, vocab=777, layers=8),
        "moss-biases": tiny("moss_vl", 4, (4, 2), hidden=96, inter=136, vocab=700, layers=5, config=BIASES),
    },
    new_tokens=8,
    starts=(
        Start(1, SPLIT, dtypes=FP32, models=("moss-6-3",)),
        Start(2, dtypes=FP32),
        Start(3, models=("moss-6-3",)),
        Start(6, dtypes=FP32, models=("moss-6-3",)),
        Start(2, PAD, PLAIN, FP32, models=("moss-6-3",)),
    ),
)

START, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
OMNI_CASES: dict[str, list[Any]] = {
    "text": [["text", f"{START}In the beginning{END}"]],
    "sound": [["text", START], ["audio", 16001], ["text", f"What?{END}"]],
    "long_sound": [["text", START], ["audio", 150000], ["text", f"Transcribe.{END}"]],
    "picture_and_sound": [["text", START], ["image", 90, 60], ["audio", 9000], ["text", f"Do they fit?{END}"]],
    "video": [["text", START], ["video", 5, 40, 60, 0], ["text", f"What?{END}"], ["text", "Well"]],
    "video_longer": [["text", START], ["video", 5, 40, 60, 20000], ["text", f"Who speaks?{END}"]],
    "sound_longer": [["text", START], ["video", 3, 40, 60, 90000], ["text", f"Who speaks?{END}"]],
}
OMNI_INPUTS: Dims = {
    "cases": OMNI_CASES,
    # Samples: 1 frame, 1 second and a sample more, 707 frames with a window of 8 chunks.
    "clips": [160, 161, 16000, 16001, 113120],
    "short": [1, 159, 160],
}
OMNI = Record(
    "qwen3_omni",
    "reference_omni",
    # The convolutions have four tiles of 32 channels, one of them in part.
    {
        "omni": tiny("qwen3_omni_moe", 3, (6, 3), hidden=112, vocab=2000, **experts(7, 2, 80), channels=104)
        | {"config": NOT_NORMALISED}
        | OMNI_INPUTS
    },
    new_tokens=8,
    starts=(Start(1, SPLIT, ALL), *(Start(tp, AUTO) for tp in (2, 3, 6))),
    mixtures={"mean": 1.3},
    # Each rank rounds its part of each of the 8 sums of the tower of 3 layers: 1.07 to 1.10 times were seen.
    encodings=1.2,
)

GEMMA3_VISION = Record(
    "gemma3_vision",
    "reference_gemma3",
    {"gemma3-6-3": tiny("gemma3", 4, (6, 3), head_dim=24, hidden=144, inter=200, vocab=777, layers=3)},
    new_tokens=8,
    # Pictures of 16 tokens reach across the windows of 20. Chunks of 18 tokens hold a picture each.
    starts=(
        Start(1, SPLIT),
        Start(3, SPLIT),
        Start(6, PAD, dtypes=FP32),
        Start(2, PAD, PLAIN, FP32),
        Start(2, SPLIT, dtypes=FP32, chunk_rows=(18,)),
    ),
)

GEMMA4_VISION = Record(
    "gemma4_vision",
    "reference_gemma4",
    {
        "gemma4-6-3": tiny("gemma4", 4, (6, 3), head_dim=24, hidden=144, inter=200, vocab=777, layers=3),
        # Per-layer inputs: placeholders have the pad token's. Tokens of a picture attend to earlier ones alone. The
        # projections of the tower have bounds.
        "gemma4-shared": tiny(
            "gemma4", 5, (4, 1), head_dim=24, hidden=96, inter=104, vocab=777, layers=6, per_layer=32
        ),
    },
    new_tokens=8,
    # Pictures of 37 and 63 tokens are longer than the windows of 20. Chunks of 80 tokens hold a picture each.
    starts=(
        Start(1, SPLIT),
        Start(6, PAD, dtypes=FP32),
        Start(2, SPLIT, dtypes=FP32, models=("gemma4-6-3",), chunk_rows=(80,)),
    ),
)

MISTRAL3_VISION = Record(
    "mistral3_vision",
    "reference_mistral3",
    {"mistral3-5-1": tiny("mistral3", 2, (5, 1), head_dim=32, hidden=96, inter=240, vocab=777, layers=2)},
    new_tokens=8,
    # Chunks of 11 tokens end within the rows of pictures of 8 and 7 tokens, each followed by a mark.
    starts=(
        Start(1, SPLIT),
        Start(3, SPLIT),
        Start(2, SPLIT, dtypes=FP32, chunk_rows=(11,)),
    ),
)
