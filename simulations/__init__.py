"""Deterministic simulation: every crash, every order, from one number."""
