"""The special tokens of harmony.

A message is START, its role, maybe ` to=RECIPIENT`, CHANNEL and a channel, maybe a space and the type of the content
(CONSTRAIN and `json`), MESSAGE, the content, and an end. Nothing stands between messages.
"""

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
"""The end of a message after which the turn goes on, of an answer, and of a call."""
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
TURN_ENDS = (RETURN, CALL)
"""Early copies of the released files leave CALL out, and the model then talks on after a call."""

ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
"""The channels: the reasoning; calls of tools, and what the user reads before them; the answer."""
CHANNELS = (ANALYSIS, COMMENTARY, FINAL)
FUNCTIONS = "functions."
"""Stands before the name of a tool of the client."""
