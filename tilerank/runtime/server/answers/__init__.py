"""From generated tokens to an answer: text, reasoning, tool calls, and the objects of the API."""
