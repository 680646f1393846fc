"""The processes of a run: start, signals, watchdog, heartbeat, and the scripts of schedulers."""
