"""Collectives between ranks, through the process group or through shared memory."""
