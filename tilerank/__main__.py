"""`python -m tilerank`: what torchrun and mpirun call; the same as the `tilerank` command."""

from tilerank.launch.cli import main

raise SystemExit(main())
