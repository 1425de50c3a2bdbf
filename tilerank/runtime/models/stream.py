"""The residual stream of one forward pass."""

from torch import Tensor

from tilerank.kernels import ops
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.parameters import PlainParameter

from ..step.batch import LogitRows


class Stream:
    """The residual stream [t, hidden] of one forward pass.

    A sum over the ranks, its addition to the stream and the norms around it are one kernel, in which each rank updates
    only the rows of its own share. Between two sums the other rows are stale, so the rows are private; `rows` brings
    all of them up to date before it returns them.
    """

    def __init__(self, rows: Tensor, ranks: int) -> None:
        """rows: the embedded tokens, equal on all `ranks` ranks."""
        self._rows = rows
        self._ranks = ranks
        self._stale_since: RMSNorm | None = None  # the norm of the sum that left rows stale

    def add(
        self,
        part: Tensor,
        norm: RMSNorm | None,
        *,
        post_norm: RMSNorm | None = None,
        scale: PlainParameter | None = None,
        update_all: bool = False,
        summed: bool = False,
    ) -> Tensor:
        """Add the sum of every rank's `part` [t, hidden] to the stream and return its norm [t, hidden], on all ranks.

        norm: None to return the stream itself; then there is a post_norm. post_norm: of the sum, before it is added.
        scale: [1], a factor of the stream after it. update_all: the rows are read before the next `add`. That is
        cheaper than bringing them up to date later. summed: `part` is the sum, the same on every rank, and all rows are
        up to date.
        """
        if norm is None:
            assert post_norm is not None
            self.add(part, post_norm, post_norm=post_norm, scale=scale, update_all=True, summed=summed)
            return self._rows
        factor = None if scale is None else scale.data
        self._stale_since = None if update_all or summed or self._ranks == 1 else norm
        return norm.add(part, self._rows, post_norm=post_norm, scale=factor, whole=update_all, summed=summed)

    def rows(self) -> Tensor:
        """Return the stream [t, hidden], equal on all ranks. It changes with the next `add`."""
        if self._stale_since is not None:
            # Adding zeros leaves the values as they are.
            nothing = ops.repeat_row(None, self._rows.shape[0], self._rows.shape[1], self._rows.dtype)
            self.add(nothing, self._stale_since, update_all=True)
        return self._rows

    def normed(self, norm: RMSNorm | None) -> Tensor:
        """Return the norm of the stream, or the stream itself without one, as `add` does."""
        return self.rows() if norm is None else norm(self.rows())

    def insert(self, rows: Tensor, values: Tensor) -> None:
        """Add values[m, hidden] to the rows [m] int64 of the stream."""
        ops.add_rows_(self.rows(), rows, values)

    def keep(self, rows: LogitRows) -> None:
        """Go on with these rows alone."""
        self._rows = rows.take(self.rows())
