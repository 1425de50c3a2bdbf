"""tilerank: a tensor-parallel runtime that serves large language models on CPU servers.

The rooms, each of which imports only what stands to its right:

    launch  ->  runtime  ->  loader  ->  parallel  ->  kernels
"""
