"""The options of the command line: their parser, how a model is found, and how it is loaded. Imports no torch."""
