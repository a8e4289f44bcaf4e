"""Pictures in rows: found and checked, counted as tokens, and put into batches."""
