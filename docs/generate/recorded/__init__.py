"""What programs of the repository print, learn and take when they run, and where that is kept."""
