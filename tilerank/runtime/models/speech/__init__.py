"""Layers of models that speak."""
