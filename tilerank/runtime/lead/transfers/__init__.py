"""Pages that enter and leave the cache: to files and back, and from prefill ranks to decode ranks."""
