"""Put on the PYTHONPATH of a command under test, to hold a rank or to spare a benchmark the measurement of peaks.

TILERANK_TEST_HOLD is RANK:FIFO; the rank waits before it loads weights, until the FIFO is opened for writing.
TILERANK_TEST_PEAKS has the fields of `Peaks` in JSON.
"""

import json
import os
from typing import Any

rank, _, fifo = os.environ.get("TILERANK_TEST_HOLD", "").partition(":")
if fifo and os.environ.get("TILERANK_RANK") == rank:
    from tilerank.loader import weights

    load_weights = weights.load_weights

    def held(*args: Any, **kwargs: Any) -> weights.LoadReport:
        with open(fifo):
            return load_weights(*args, **kwargs)

    weights.load_weights = held

if known := os.environ.get("TILERANK_TEST_PEAKS"):
    from tilerank.launch.bench import peaks

    figures = json.loads(known)
    peaks.peaks_of = lambda cores: peaks.Peaks(**figures)
