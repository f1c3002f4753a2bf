"""GPT-2 and its shape."""
