"""Converts public corpora to array-JSON."""
