"""Chat answers read: text of the model into content, reasoning and tool calls. Pure functions of text, no I/O."""
