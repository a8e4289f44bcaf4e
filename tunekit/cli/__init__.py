"""Command line: one module per group of commands. It alone prints and sets exit codes."""
