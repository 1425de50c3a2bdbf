"""/v1/messages of Anthropic."""
