"""What a user opens, names or gives may run no code, leave its place, or be told to others."""
