"""Models that answer: prompts of a file, a chat, an OpenAI-compatible server."""
