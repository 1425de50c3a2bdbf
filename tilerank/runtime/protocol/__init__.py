"""What the processes say to each other: prompts, parameters, events, messages to the ranks. Imports no torch."""
