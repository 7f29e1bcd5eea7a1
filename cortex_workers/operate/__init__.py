"""What operators see and do above a single run."""
