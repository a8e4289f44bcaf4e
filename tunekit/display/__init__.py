"""Renderables of rich and plotext for a terminal or a notebook. Nothing here prints."""
