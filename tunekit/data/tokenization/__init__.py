"""Rows to token ids and loss masks through the chat template."""
