"""Readers of vocabulary files. Each file of a kind is read by one module here, found by its name (table.py)."""
