"""The model families, one file each with a table MODELS from `model_type` to a builder, and the layers they share."""
