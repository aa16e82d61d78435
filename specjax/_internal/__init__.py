"""Helpers that every layer may use. Nothing here is for users."""
