"""What ranks keep of sequences and of media between steps, and which of it belongs to whom."""
