"""What a model may ask for, or needs before it is in chunks: scopes, embeddings in host memory, tiled layers, lazy start."""
