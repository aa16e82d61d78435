"""Compiled kernels. Nothing above this layer knows for which processor they are written."""
