"""A run: the folder in which a plan happens, what each process does there, and what it writes down."""
