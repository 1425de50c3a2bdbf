"""Programs that run other inference systems for `bench compare`, each in a Python environment that has the system."""
