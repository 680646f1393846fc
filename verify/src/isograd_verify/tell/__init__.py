"""Findings and verdicts, and how they are put into words, tables and pages."""
