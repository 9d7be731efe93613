"""Other APIs (Anthropic's messages, Ollama's, OpenAI's responses) as translations to and from one chat request."""
