"""Families without torch: processors of media, options, formats of tool calls. Also the decoding of media."""
