"""A run's state on disk, and trained models from anywhere."""
