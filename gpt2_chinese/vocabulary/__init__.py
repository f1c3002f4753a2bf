"""Text to token ids and back; training a vocabulary."""
