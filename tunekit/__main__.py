"""`python -m tunekit` is the command line."""

from tunekit.cli import main

main()
