"""PatrickStar: chunk-based training of models larger than the accelerator's memory."""
