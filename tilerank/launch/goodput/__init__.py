"""Goodput: the highest rate of requests at which a server keeps its limits of latency. Imports no torch."""
