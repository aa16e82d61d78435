"""Encoder–decoder models: T5 and Whisper as targets and drafters."""
