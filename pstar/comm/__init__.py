"""Collectives between ranks: through the process group, through shared memory, or on several nodes in two levels."""
