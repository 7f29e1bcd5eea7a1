"""Holding a run: identity, keeper, drain."""
