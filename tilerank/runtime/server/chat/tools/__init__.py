"""Tool calls: the formats in which models write them, and how they are read from the text of an answer."""
