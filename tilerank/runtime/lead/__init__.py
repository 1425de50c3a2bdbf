"""Code of rank 0 alone: the engine, the scheduler, sampling, and the pools that give memory to sequences."""
