"""Options of a model and its start before it is in chunks: scopes, host-memory embeddings, tiled layers, lazy start."""
