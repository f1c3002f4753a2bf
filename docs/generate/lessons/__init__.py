"""What the lessons of the chapters compute: the wall before a chapter, its prediction, and times over real links."""
