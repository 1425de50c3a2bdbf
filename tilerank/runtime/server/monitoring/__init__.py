"""Monitoring for operators: metrics, the data of the status page, counters of ranks and recent requests."""
