"""One run: enqueue, continue, pause, decide, finish."""
