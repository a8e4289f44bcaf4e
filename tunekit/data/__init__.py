"""Rows in any known shape become token ids with a loss mask: read, validate, tokenise, pack."""
