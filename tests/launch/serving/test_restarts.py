"""The waits before a part of a server is started again. Their order is that of docs/failures.md."""

from tilerank.launch.serving.restarts import RestartWaits


def test_waits_double_up_to_half_a_minute() -> None:
    waits = RestartWaits()
    ups = (3600.0, 0.1, 59.9, None, 10.0, None, 0.0, 0.0)
    assert [waits.after(up_s) for up_s in ups] == [0, 1, 2, 4, 8, 16, 30, 30]


def test_a_part_that_was_up_for_a_minute_begins_anew() -> None:
    waits = RestartWaits()
    assert [waits.after(up_s) for up_s in (1.0, 1.0, 1.0, 60.0, 1.0, None)] == [0, 1, 2, 0, 1, 2]


def test_a_part_that_fails_to_start_after_its_first_end() -> None:
    waits = RestartWaits()
    assert [waits.after(up_s) for up_s in (1.0, None, None)] == [0, 1, 2]
