"""How checkpoints store weights: which rectangles of stored tensors make a rectangle of a weight."""
