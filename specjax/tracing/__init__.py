"""``trace``: decodes a text round by round; the record is shown as one HTML page."""
