"""Media in rows, such as pictures: found and checked, counted as tokens, and put into batches."""
