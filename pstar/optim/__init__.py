"""Updates where the states lie: Adam over chunks, on plain tensors, and for parameters outside of chunks."""
