"""The towers of models that see or hear: what encodes pictures, videos and sound."""
