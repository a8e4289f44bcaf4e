"""`python -m tunekit` is the command line."""

from tunekit.cli.app import main

main()
