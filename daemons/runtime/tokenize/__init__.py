"""Text and chats to ids, and ids to text at once: for the tokenizer, and for a router with --tokenizer-path."""
