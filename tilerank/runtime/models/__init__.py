"""The model families, one file each; every file has a table MODELS from `model_type` to a class."""
