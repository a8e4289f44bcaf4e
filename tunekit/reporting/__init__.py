"""Pages and tables about finished and running runs."""
