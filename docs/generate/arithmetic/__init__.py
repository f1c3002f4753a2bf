"""Bytes, traffic and time as formulas, and the tables worked with them."""
