"""What every API becomes, a chat, and what comes back of it: text, reasoning and tool calls."""
