"""What becomes of the keys of DeepSpeed's and of PatrickStar's configurations: a table, and what applies it."""
