"""Models, their tokenizers, and the adapters on them; the models that ship lie in `pico` and `pico_vision`."""
