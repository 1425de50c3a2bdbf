"""bench speculative, by hand: the limit of one token a read, and tokens a step. tests/benchmarks runs the command."""

from tilerank.launch.bench.speculative.command import tokens_per_step
from tilerank.launch.bench.speculative.limit import bytes_read
from tilerank.launch.planning.work import ModelWork
from tilerank.parallel.cost import Cost


def test_the_bytes_of_plain_decoding_by_hand() -> None:
    """Weights of 1000 bytes and 2 bytes for a cached token: three steps, of which the first one has both answers."""
    work = ModelWork(Cost(read=900), Cost(read=100), cached=2)
    steps = [1000 + 2 * (10 + 1) + 2 * (20 + 1), 1000 + 2 * (10 + 2), 1000 + 2 * (10 + 3)]
    assert bytes_read(work, [(10, 4), (20, 2)]) == sum(steps)


def test_a_sequence_that_has_ended_takes_part_in_no_step() -> None:
    """Of two sequences, one ends after the first step. The other goes on alone, with three tokens and with one."""
    assert tokens_per_step([[7, 7, 8], [8, 8, 8], [8]]) == (2 + 1 + 3 + 1) / (2 + 1 + 1)
