"""Adam in the tier of its states: over chunks, on plain tensors, and for parameters outside of chunks."""
