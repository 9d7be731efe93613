"""Gates of servers that have little memory: few messages arrive at a time."""
