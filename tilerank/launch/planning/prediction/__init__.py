"""Predictions of speed: a machine as a file describes it, and the time of a step on it."""
