"""Child processes: their start, output, messages, limits and end. Imports no torch."""
