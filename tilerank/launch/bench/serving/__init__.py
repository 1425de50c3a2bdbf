"""The parts of `tilerank bench serve`: its HTTP client, and the search for the goodput of a server."""
