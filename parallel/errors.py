"""What can go wrong between ranks: one class for the arithmetic, one for the group."""


class ShardError(ValueError):
    """A model cannot be cut the way it was asked for. One sentence: what, how many ways, where the limit is."""


class GroupError(RuntimeError):
    """The ranks can no longer work together. One sentence that names the rank and what happened to it."""
