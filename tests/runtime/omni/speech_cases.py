"""The cases of the tests of speech."""

from typing import Any

START, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
CASES: dict[str, list[Any]] = {
    "text": [["text", f"{START}Say hello.{END}"]],
    "media": [
        ["text", f"<|im_start|>system\nBe kind.<|im_end|>\n{START}"],
        ["image", 90, 60],
        ["audio", 9000],
        ["text", f"Do they fit?{END}"],
    ],
    "turns": [["text", f"{START}One?{END}Yes.<|im_end|>\n{START}Two, and three?{END}"]],
}
"""A prompt of one turn; media after a system prompt, which the talker does not read; two turns of the user."""
DIMS = {"heads": 6, "kv_heads": 3, "hidden": 112, "vocab": 2000, "experts": 7, "moe_inter": 80}
NEW_TOKENS, FRAMES, SAMPLINGS = 6, 9, 5
"""The talker speaks three tokens and the end of the text, and then goes on."""
