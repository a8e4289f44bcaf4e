"""Models, their tokenizers, and the adapters on them. The folder `pico` is the chat model that ships with tunekit."""
