"""Shipped test doubles and helpers."""
