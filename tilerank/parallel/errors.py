"""Errors of sharding and of the group of ranks."""


class ShardError(ValueError):
    """A model cannot be cut as asked. One sentence: the dimension, the number of ranks, and what is possible."""


class GroupError(RuntimeError):
    """The ranks can no longer work together. One sentence: the rank, and what happened to it."""
