"""Measurements around the loop: timing, comparison, memory, plans and the search for trees."""
