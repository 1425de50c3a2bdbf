"""What an operator sees of a server: metrics, the status page, counters of ranks and recent requests."""
