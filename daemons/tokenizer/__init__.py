"""The tokenizer daemon: text and chats to ids, and back at once."""
