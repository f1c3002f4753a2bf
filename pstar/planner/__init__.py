"""Predicts whether a model fits a machine, in which mode, with which chunk size, and how fast."""
