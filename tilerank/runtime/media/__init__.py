"""What families are without torch: media and processors, options, tool calls. Also the decoding of media."""
