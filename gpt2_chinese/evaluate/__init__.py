"""How well a model predicts held-out text."""
