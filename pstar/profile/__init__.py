"""What a run did, recorded, cut, exported and drawn."""
