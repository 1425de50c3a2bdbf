"""Processes of `tilerank serve` beside the ranks: HTTP, its supervisor, decoders of media and trials of grammars."""
