"""Code of every rank: the worker, which executes messages of rank 0, and the table of model families."""
