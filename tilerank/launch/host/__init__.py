"""The host that ranks run on: its topology, control group limits, and the placement and binding of ranks."""
