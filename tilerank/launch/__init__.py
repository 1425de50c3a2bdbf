"""The `tilerank` command: topology, placement, rendezvous and supervision of the ranks."""
