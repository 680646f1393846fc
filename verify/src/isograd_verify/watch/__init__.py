"""Watches one rank from inside its process: hooks, collectives, and what they keep."""
