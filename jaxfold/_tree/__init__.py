"""Blocks named by path in a parameter tree."""
