"""WHAT the user asks for: the recipe, its schema, and how it is read. Imports no torch."""
