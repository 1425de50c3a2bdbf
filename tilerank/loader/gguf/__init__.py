"""GGUF files: their reader, and what the rest of the loader takes from one in place of a model directory."""
