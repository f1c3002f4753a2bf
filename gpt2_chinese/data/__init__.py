"""From token ids to batches."""
