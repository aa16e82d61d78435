"""``trace``: a text decoded round by round, recorded and shown as one HTML page."""
