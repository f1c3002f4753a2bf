"""The recording of a run: written, cut to some steps, exported and drawn."""
