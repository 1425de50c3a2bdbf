"""What rank 0 alone runs: the engine, the scheduler, sampling, and the pools from which sequences take memory."""
