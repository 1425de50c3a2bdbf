"""The APIs: a folder or a file for each, with its body, its answer and its routes."""
