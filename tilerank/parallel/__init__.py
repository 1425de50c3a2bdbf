"""How a dimension is cut over ranks, the sharded layers, and the collectives by which ranks add up."""
