"""How ranks start, meet, agree and stop."""
