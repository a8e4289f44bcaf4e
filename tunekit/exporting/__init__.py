"""A run's result as a folder, a GGUF file, an Ollama model or a repository of the hub."""
