"""One run: resolve its settings, train, log, save."""
