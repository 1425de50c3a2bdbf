"""A model without HTTP: ranks in processes of their own, and this process, which sends them requests."""
