"""Models in Python: `from tilerank import LLM, SamplingParams`."""
