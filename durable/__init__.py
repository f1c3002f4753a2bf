"""What both packages write to a disk, complete or absent, and torch's distributed checkpoints; knows neither of them."""
