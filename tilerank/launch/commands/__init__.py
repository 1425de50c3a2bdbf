"""The subcommands that run a model, plan it or examine this machine: each has `add_arguments` and `run`."""
