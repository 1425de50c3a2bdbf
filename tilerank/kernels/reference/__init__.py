"""Every kernel in plain torch: the oracle of the tests, and the path of machines without the compiled core.

A file here has the functions of the file of the same name in kernels/, with the same parameters. Each row is computed
by calls whose shapes depend on that row alone, never on the batch, so equal rows give equal bits here as well.
"""
