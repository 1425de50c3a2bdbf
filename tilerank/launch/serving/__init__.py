"""What `tilerank serve` runs beside the ranks: the HTTP process, its supervisor, decoders and trials of grammars."""
