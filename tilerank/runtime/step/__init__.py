"""What one pass of the model is made of, on every rank: interfaces of models, the batch, caches, recorded steps."""
