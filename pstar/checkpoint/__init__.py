"""The state out of chunks and back: on each rank, sharded on disk, as one file of weights."""
