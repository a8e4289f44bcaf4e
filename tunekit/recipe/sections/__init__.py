"""Sections of a recipe as pydantic models."""
