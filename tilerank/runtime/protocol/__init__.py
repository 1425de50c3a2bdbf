"""Messages between the processes: prompts, parameters, events, messages to the ranks. Imports no torch."""
