"""Chaos: real workers on real brokers, broken at random moments, and what must hold afterwards."""
