"""Reads the state out of chunks and writes it back: on each rank, as a sharded checkpoint, as one file of weights."""
