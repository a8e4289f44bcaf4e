"""One file per training method: each builds a TRL trainer from a model, data and the plan's numbers."""
