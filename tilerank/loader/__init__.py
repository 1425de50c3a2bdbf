"""Model directories: configuration, checkpoints, tokenizers and chat templates, without running any of their code."""
