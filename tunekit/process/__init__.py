"""One process of a run: heartbeat, watchdog, signals, exit status and collectives."""
