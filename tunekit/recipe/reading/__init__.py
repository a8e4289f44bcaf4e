"""YAML text and overrides to plain values and back, with their locations."""
