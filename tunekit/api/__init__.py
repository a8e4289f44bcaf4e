"""Verbs that the command line, the web UI and Python share."""
