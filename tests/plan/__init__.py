"""Tests of isograd.plan."""
