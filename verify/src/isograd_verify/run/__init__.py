"""Starts programs, watches over them, and runs the corpus."""
