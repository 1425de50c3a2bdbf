"""Put on the PYTHONPATH of a command under test: the named rank waits before it loads weights.

TILERANK_TEST_HOLD is RANK:FIFO; the rank continues once the FIFO is opened for writing.
"""

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
