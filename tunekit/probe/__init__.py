"""Look at the machine and at a model's files, and write down facts. Nothing is decided here, and no torch is needed."""
