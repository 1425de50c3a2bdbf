"""What every rank runs: the worker that takes messages of rank 0, and the table of model families."""
