"""Monitoring for operators: metrics, the status page, counters of ranks and recent requests."""
