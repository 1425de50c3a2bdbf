"""`tilerank bench`: kernels, collectives, models and servers, measured against the peaks of the machine."""
