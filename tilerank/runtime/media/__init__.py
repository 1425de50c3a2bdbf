"""Pictures and videos of prompts: decoding, and the processor of each family. Imports no torch."""
