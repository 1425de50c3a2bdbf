"""The parts of a forward pass, on every rank: interfaces of models, the batch, caches, recorded steps."""
