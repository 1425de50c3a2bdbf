"""From requests to tokens: the engine, the scheduler, caches, sampling, and the model families."""
